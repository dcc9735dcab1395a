"""Map the repository's top-level folders to the import package `rollstock`; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = {
    "rollstock": "core",
    "rollstock.algorithms": "algorithms",
    "rollstock.backends": "backends",
    "rollstock.hardware": "hardware",
    "rollstock.plugins": "plugins",
}

setup(
    package_dir=FOLDERS,
    packages=[
        package
        for name, folder in FOLDERS.items()
        for package in [name, *(f"{name}.{inner}" for inner in find_packages(folder))]
    ],
)
