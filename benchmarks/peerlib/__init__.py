# SPDX-License-Identifier: Apache-2.0
"""The parts of ``benchmarks/peers.py``: the peers, what is measured with them, the bars, the chart."""
