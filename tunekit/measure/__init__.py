# SPDX-License-Identifier: Apache-2.0
"""Measuring: what a candidate row must pass, how it is timed, and how a winner follows from the times.

``fixtures`` is what a family provides; ``gate`` and ``child`` run a row's checks where it can do no harm;
``race`` takes the times; ``stats`` decides (pure); ``record`` keeps everything. :mod:`tunekit.tuner` joins them.
Nothing here is imported by an application that only runs tuned code.
"""
