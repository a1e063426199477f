# SPDX-License-Identifier: Apache-2.0
"""Templates of generated C; read through importlib.resources."""
