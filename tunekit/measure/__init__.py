# SPDX-License-Identifier: Apache-2.0
"""Measuring: what a candidate row must pass, how it is timed, and how a winner follows from the times.

``fixtures`` is what a family provides, ``family`` finds it; ``gate`` and ``child`` run a row's checks where it can do
no harm; ``race`` takes the times and ``racing`` is the process in which it does, ``stats`` decides (pure),
``competition`` holds a kernel's races and ``verdicts`` says in words how they went; ``confirm`` puts a winner to whole
chains of work, each ``arm`` a process; ``record`` keeps everything, ``journal`` what a later run need not measure
again. :mod:`tunekit.tuner` joins them.
Nothing here is imported by an application that only runs tuned code.
"""
