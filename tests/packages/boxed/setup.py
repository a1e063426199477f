# SPDX-License-Identifier: Apache-2.0
"""A library of somebody else's, with tuned kernels and an application that has a policy."""

from setuptools import setup

setup(
    name="boxed",
    version="1.0",
    packages=["boxed"],
    package_data={"boxed": ["*.j2"]},
    tunekit_modules=["boxed/kernels.py"],
    entry_points={
        "tunekit.families": ["boxed = boxed.kernels"],
        "console_scripts": ["boxed = boxed.__main__:main"],
    },
)
