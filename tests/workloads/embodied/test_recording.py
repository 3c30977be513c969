"""What a rollout keeps: turns, the observation at each cut, and nothing that failed."""

from __future__ import annotations

import torch

from m2flow.workloads.embodied.workers.recording import Recording


def at(number: float) -> dict[str, torch.Tensor]:
    return {"state": torch.tensor([number])}


def turn(recording: Recording, reward: float, *, success: bool = False, now: float = 0.0) -> None:
    acted = {"tokens": torch.tensor([[1.0]])}
    recording.add(acted, torch.tensor([reward]), 1, success=success, success_once=success)
    recording.now = at(now)


def test_a_cut_keeps_the_observation_there() -> None:
    recording = Recording(1, -1, False, at(0.0))
    turn(recording, 1.0, now=1.0)
    turn(recording, 2.0, success=True, now=2.0)
    recording.end(terminated=False)
    recording.now = at(5.0)
    turn(recording, 3.0, now=6.0)
    recording.stop()
    rows = recording.rows()
    assert rows["ends"].tolist() == [False, True, False]
    assert rows["cut"].tolist() == [False, True, True]
    assert rows["observation.state"][:, 0].tolist() == [0.0, 1.0, 5.0]
    assert recording.cut_rows()["state"][:, 0].tolist() == [2.0, 6.0]
    (episode,) = recording.episodes
    assert episode.figures() == {"return": 3.0, "length": 2.0, "success_once": 1.0, "success": 1.0}


def test_behind_an_end_of_its_own_there_is_nothing_to_be_worth() -> None:
    recording = Recording(1, -1, False, at(0.0))
    turn(recording, 1.0)
    recording.end(terminated=True)
    recording.stop()
    assert recording.rows()["cut"].tolist() == [False]
    assert recording.cut_rows() == {}


def test_an_episode_that_fails_takes_only_its_own_turns() -> None:
    recording = Recording(1, -1, False, at(0.0))
    turn(recording, 1.0)
    recording.end(terminated=False)
    turn(recording, 7.0)
    recording.fail(1)
    turn(recording, 2.0)
    recording.single = True
    recording.stop()
    assert recording.rows()["reward"][:, 0].tolist() == [1.0, 2.0]
    assert [one.reward for one in recording.episodes] == [1.0, 2.0]
    assert (recording.failed, recording.steps) == (1, 4)
