# SPDX-License-Identifier: Apache-2.0
"""``python -m tunekit report``: what a retune measured, as one page that needs nothing but a browser.

``sources`` finds run records and ceilings, ``reading`` makes plain figures of them (no file is touched there),
``charts`` and ``page`` draw, ``picture`` is the PNG, which needs the extra ``report``.
"""
