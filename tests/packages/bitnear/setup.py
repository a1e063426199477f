# SPDX-License-Identifier: Apache-2.0
"""Nearest neighbours by Hamming distance. One line is tunekit's; the rest is any package's."""

from setuptools import setup

setup(
    name="bitnear",
    version="1.0",
    packages=["bitnear"],
    install_requires=["tunekit-native", "numpy"],
    entry_points={"tunekit.families": ["bitnear = bitnear.kernels"]},
    tunekit_modules=["bitnear/kernels.py"],
)
