# SPDX-License-Identifier: Apache-2.0
"""One small vocabulary header per instruction leg."""
