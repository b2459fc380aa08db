"""What the long tests share with the system tests."""

from system.conftest import cluster, one_import_of_vllm  # noqa: F401 - fixtures
