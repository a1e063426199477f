# SPDX-License-Identifier: Apache-2.0
"""``python -m tunekit doctor``: what on this box makes timing unreliable or kernels unavailable, each with its mend.

``facts`` asks the machine, ``findings`` judges; judging is pure, so every ill box can be tested on this
one.
"""
