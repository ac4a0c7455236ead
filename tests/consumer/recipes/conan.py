# SPDX-License-Identifier: Apache-2.0
"""conan.py RECIPE FOLDER: runs a recipe as conan does, with what it uses of conan replaced by the least that does the same, and
prints the folder of the package's CMake files. Whether conan itself takes the recipe, only conan can say."""

import fnmatch
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import types

RECIPE, FOLDER = (pathlib.Path(argument).resolve() for argument in sys.argv[1:])


class Anything:
    """Takes all that a recipe says of its package."""

    def __init__(self):
        self.properties, self.cleared = {}, False

    def set_property(self, name, value):
        self.properties[name] = value

    def clear(self):
        self.cleared = True


class ConanFile:
    recipe_folder = str(RECIPE.parent)
    export_sources_folder, source_folder, build_folder, package_folder = (
        str(FOLDER / name) for name in ("sources", "sources", "build", "package"))

    def __init__(self):
        self.cpp_info, self.info, self.variables = Anything(), Anything(), {}


class CMakeToolchain:
    def __init__(self, recipe):
        self.recipe, self.cache_variables = recipe, {}

    def generate(self):
        self.recipe.variables = self.cache_variables


class CMake:
    def __init__(self, recipe):
        self.recipe = recipe

    def configure(self):
        options = ["-D%s=%s" % (name, "ON" if value is True else "OFF" if value is False else value)
                   for name, value in self.recipe.variables.items()]
        subprocess.run(["cmake", "-S", self.recipe.source_folder, "-B", self.recipe.build_folder,
                        "-DCMAKE_INSTALL_PREFIX=" + self.recipe.package_folder] + options, check=True, stdout=sys.stderr)

    def install(self):
        subprocess.run(["cmake", "--install", self.recipe.build_folder], check=True, stdout=sys.stderr)


def copy(_, pattern, src, dst):
    for path in pathlib.Path(src).rglob("*"):
        name = path.relative_to(src).as_posix()
        if path.is_file() and fnmatch.fnmatch(name, pattern):
            (pathlib.Path(dst) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, pathlib.Path(dst) / name)


def module(name, **contents):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(contents)


module("conan", ConanFile=ConanFile)
module("conan.tools")
module("conan.tools.cmake", CMake=CMake, CMakeToolchain=CMakeToolchain)
module("conan.tools.files", copy=copy)
shutil.rmtree(FOLDER, ignore_errors=True)
spec = importlib.util.spec_from_file_location("recipe", RECIPE)
recipe_file = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe_file)

recipe = recipe_file.Heed()
recipe.export_sources()
recipe.generate()
recipe.package()
recipe.package_id()
recipe.package_info()
assert recipe.info.cleared, "a package of headers is the same for all compilers and systems"
print(os.path.join(recipe.package_folder, recipe.cpp_info.builddirs[0]))
