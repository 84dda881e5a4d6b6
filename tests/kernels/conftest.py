from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.kernels.parallel import Team


@pytest.fixture(scope="session")
def teams() -> Iterator[list[Team]]:
    """Teams of 1, 2 and 3 threads."""
    made = [Team(num_threads) for num_threads in (1, 2, 3)]
    yield made
    for team in made:
        team.close()
