# SPDX-License-Identifier: Apache-2.0
"""The parts of a generated module that no row decides."""
