# SPDX-License-Identifier: Apache-2.0
"""The package that ``python -m tunekit new`` writes."""
