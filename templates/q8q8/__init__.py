# SPDX-License-Identifier: Apache-2.0
"""The Q8 x Q8 family."""
