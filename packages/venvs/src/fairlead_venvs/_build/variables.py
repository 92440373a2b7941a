# SPDX-License-Identifier: Apache-2.0
"""The variables that uv reads, by purpose. A test compares the lists with the help of uv."""

import re

# Variables that describe the environment of the caller, or Fairlead passes the same setting to uv in another way.
NOT_INHERITED = (
    "CONDA_PREFIX",
    "PYTHONHOME",
    "PYTHONPATH",
    "UV_FROZEN",
    "UV_ISOLATED",
    "UV_LOCKED",
    "UV_NO_DEFAULT_GROUPS",
    "UV_NO_DEV",
    "UV_NO_EDITABLE",
    "UV_NO_GROUP",
    "UV_NO_INSTALL_LOCAL",
    "UV_NO_INSTALL_PROJECT",
    "UV_NO_INSTALL_WORKSPACE",
    "UV_NO_PROJECT",
    "UV_NO_SYNC",
    "UV_PROJECT",
    "UV_PROJECT_ENVIRONMENT",
    "UV_PYTHON",
    "UV_SYSTEM_PYTHON",
    "UV_VENV_RELOCATABLE",
    "UV_VENV_SEED",
    "UV_WORKING_DIR",
    "VIRTUAL_ENV",
    "__PYVENV_LAUNCHER__",
)
DEFAULT_INDEXES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL")
INDEXES = (*DEFAULT_INDEXES, "UV_EXTRA_INDEX_URL", "UV_INDEX")
# Their values are the paths of files, separated by spaces.
FILES = ("UV_BUILD_CONSTRAINT", "UV_CONFIG_FILE", "UV_CONSTRAINT", "UV_EXCLUDE", "UV_OVERRIDE")
# Variables that decide which distributions uv finds and chooses, and how it builds them.
DECIDING = (
    *INDEXES,
    *FILES,
    "UV_AMD_GPU_ARCHITECTURE",
    "UV_CUDA_DRIVER_VERSION",
    "UV_EXCLUDE_NEWER",
    "UV_EXCLUDE_NEWER_PACKAGE",
    "UV_FIND_LINKS",
    "UV_FORK_STRATEGY",
    "UV_GIT_LFS",
    "UV_INDEX_STRATEGY",
    "UV_NO_BINARY",
    "UV_NO_BINARY_PACKAGE",
    "UV_NO_BUILD",
    "UV_NO_BUILD_ISOLATION",
    "UV_NO_BUILD_PACKAGE",
    "UV_NO_CONFIG",
    "UV_NO_SOURCES",
    "UV_NO_SOURCES_PACKAGE",
    "UV_PRERELEASE",
    "UV_PRERELEASE_PACKAGE",
    "UV_RESOLUTION",
    "UV_TORCH_BACKEND",
)
# Prefixes of variables that decide how something is built, and not its content.
NEUTRAL = (
    *("ALL_PROXY", "HTTP", "NO_PROXY", "RUST_LOG", "SSL_"),
    *("UV_CACHE_DIR", "UV_COMPILE_BYTECODE", "UV_CONCURRENT_", "UV_CUSTOM_COMPILE_COMMAND", "UV_HTTP_"),
    *("UV_INSECURE_HOST", "UV_KEYRING_PROVIDER", "UV_LINK_MODE", "UV_LOG_", "UV_NATIVE_TLS", "UV_NO_CACHE"),
    *("UV_NO_PROGRESS", "UV_OFFLINE", "UV_REQUEST_", "UV_SYSTEM_CERTS"),
)
# Credentials give access to an index and do not decide its content, so a new password is not a new environment.
INDEX_CREDENTIAL = r"UV_INDEX_\w+_(USERNAME|PASSWORD)"


def is_neutral(name: str) -> bool:
    """Return whether a variable only says how something is built."""
    return name.upper().startswith(NEUTRAL)


def is_index_credential(name: str) -> bool:
    """Return whether a variable holds a credential of a package index."""
    return re.fullmatch(INDEX_CREDENTIAL, name) is not None
