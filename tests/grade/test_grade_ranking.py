"""The ranking: by hand-worked numbers, ties where intervals overlap, and nothing that is not right."""

from __future__ import annotations

from typing import Any

import pytest

from ece408_op.grade import _reports
from ece408_op.grade._spec import RankingSpec


def record(path: str, milliseconds: float, spread: float = 0.0, status: str = "passed") -> dict[str, Any]:
    seconds = milliseconds / 1e3
    layer = {"seconds": {"median": seconds, "fastest": seconds - spread / 1e3, "slowest": seconds + spread / 1e3}}
    network = {"network": "2017", "images": 9, "status": status, "layers": [layer], "seconds": seconds}
    return {"path": path, "status": status, "precision": "float32", "networks": [network]}


def rank(records: list[dict[str, Any]], rules: RankingSpec) -> list[dict[str, Any]]:
    return [place for places in _reports.rank(records, rules).values() for place in places]


def places_of(records: list[dict[str, Any]]) -> list[str]:
    """The network, the place and the path of each."""
    return [f"{one['network']}: {one['place']} {one['path']}" for one in rank(records, RankingSpec())]


NOT_RIGHT = ("wrong", "unstable", "tampered")


def test_points_by_hand() -> None:
    # Median 3, median absolute deviation 1, which is a standard deviation of 1.4826.
    places = rank([record(str(ms), ms) for ms in (5, 1, 3, 2, 4)], RankingSpec(best=100, worst=0, clamp=2))
    assert [place["path"] for place in places] == ["1", "2", "3", "4", "5"]
    assert places[0]["deviations"] == pytest.approx(2 / 1.4826)
    assert places[0]["points"] == pytest.approx(100 * (2 / 1.4826 + 2) / 4)
    assert places[2]["points"] == pytest.approx(50)


@pytest.mark.parametrize("clamp", [0.5, 0])
def test_points_are_clamped(clamp: float) -> None:
    places = rank([record("a", 1), record("b", 10), record("c", 10.1), record("d", 1e6)], RankingSpec(90, 60, clamp))
    assert (places[0]["points"], places[-1]["points"]) == (90, 60)


def test_an_outlier_moves_the_points_little() -> None:
    usual = [record(str(ms), ms) for ms in (10, 11, 12, 13, 14)]
    calm = rank(usual, RankingSpec())
    shaken = rank([*usual, record("slow", 5000)], RankingSpec())
    assert abs(shaken[0]["points"] - calm[0]["points"]) < 15


def test_other_numbers_of_images_are_ranked_by_themselves() -> None:
    few, fewer = record("few", 1), record("fewer", 2)
    few["networks"][0]["images"] = fewer["networks"][0]["images"] = 3
    expected = ["9 images: 1 a", "9 images: 2 b", "3 images: 1 few", "3 images: 2 fewer"]
    found = places_of([record("a", 10), few, record("b", 20), fewer])
    assert found == [f"2017, {one}" for one in expected]


@pytest.mark.parametrize(
    ("records", "places"),
    [
        ([record("a", 10, 1), record("b", 11, 1), record("c", 12.5, 1), record("d", 30, 1)], "a1 b1 c3 d4"),
        *(([record("a", 1, status=one), record("b", 2), record("c", 3)], "b1 c2") for one in NOT_RIGHT),
        ([record("a", 1)], ""),  # one alone
    ],
)
def test_overlapping_intervals_share_a_place_and_what_is_not_right_has_none(records, places) -> None:
    assert " ".join(f"{one['path']}{one['place']}" for one in rank(records, RankingSpec())) == places


def test_classes_of_precision_are_ranked_by_themselves() -> None:
    records = [record("a", 10), record("half", 1), record("b", 20), record("wino", 5), record("halves", 2)]
    records[1]["precision"] = records[4]["precision"] = "half"
    records[3]["precision"] = "float32 by transforms"
    expected = [": 1 wino", ": 2 a", ": 3 b", ", half: 1 half", ", half: 2 halves"]
    assert places_of(records) == [f"2017, 9 images{one}" for one in expected]
    mixed = rank(records, RankingSpec(mix_precisions=True))
    assert [place["path"] for place in mixed] == ["half", "halves", "wino", "a", "b"]
