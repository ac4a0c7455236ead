# SPDX-License-Identifier: Apache-2.0
"""Packs heed.py with libheed, which CMake builds: in $HEED_BUILD or build/ of the tree, where that is configured for it, else in a
folder of its own."""

import os
import pathlib
import shutil
import subprocess

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution
from wheel.bdist_wheel import bdist_wheel

HERE = pathlib.Path(__file__).resolve().parent
TREE = HERE.parent.parent


def build_library(own):
    """The path of libheed, built; `own` is the folder of the build where the tree has none."""
    def build(folder):
        return subprocess.run(["cmake", "--build", str(folder), "--target", "heed_c", "--parallel"]).returncode == 0

    for folder in (pathlib.Path(os.environ.get("HEED_BUILD", TREE / "build")), own):
        if folder == own:
            subprocess.run(["cmake", "-S", str(TREE), "-B", str(own), "-DCMAKE_BUILD_TYPE=Release", "-DHEED_BUILD_C=ON", "-DHEED_BUILD_TESTS=OFF",
                            "-DHEED_BUILD_BENCH=OFF", "-DHEED_BUILD_EXAMPLES=OFF"], check=True)
        if (folder / "CMakeCache.txt").exists() and build(folder):
            return folder / "libheed.so"
    raise SystemExit("heed: libheed could not be built; the reason stands above")


class Build(build_py):
    def run(self):
        package = pathlib.Path(self.build_lib) / "heed"
        package.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "heed.py", package / "__init__.py")
        shutil.copy(build_library(pathlib.Path(self.build_lib).resolve().parent / "libheed"), package)
        (package / "py.typed").touch()


class Platform(Distribution):
    def has_ext_modules(self):
        return True


class Wheel(bdist_wheel):
    """libheed is C: one wheel for every Python on this kind of machine."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(distclass=Platform, cmdclass={"build_py": Build, "bdist_wheel": Wheel})
