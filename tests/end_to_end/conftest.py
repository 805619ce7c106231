"""One server for all end-to-end tests, with the repository's own pipeline in a hurry."""

import os
from collections.abc import Iterator

import pytest

from tests.end_to_end.project import Project


@pytest.fixture(scope="package")  # it must not go on beside the tests of other packages
def project(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Project]:
    """A project whose sensor has taken three epochs by itself, and goes on. More of them make better pictures."""
    epochs = 8 if "ARROYO_SCREENSHOTS" in os.environ else 3
    with Project(tmp_path_factory.mktemp("project")) as project:
        try:
            project.wait_for_epoch(epochs, 80 * epochs)
            yield project
        finally:
            if request.session.testsfailed:
                print(project.server.printed())
