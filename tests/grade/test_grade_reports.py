"""What is made of records: the student's report, the class's pages, and the ranking, by hand-worked numbers."""

import re
from typing import Any

import pytest

from ece408_op.grade import _reports
from ece408_op.grade._spec import RankingSpec


def record(path: str, milliseconds: float, spread: float = 0.0, status: str = "passed") -> dict[str, Any]:
    seconds, half = milliseconds / 1e3, spread / 1e3
    times = {"median": seconds, "fastest": seconds - half, "slowest": seconds + half, "count": 8}
    layer = {"layer": [1, 28, 28, 50, 5], "status": "passed", "reason": "", "seconds": times, "runs": []}
    layer.update(first_call_seconds=3 * seconds, roofline_seconds=0.001)
    accuracy = {"model": "ece408-high", "images": 100, "source": "sample", "accuracy": 0.93, "agreement": 1.0}
    network = {"network": "2017", "images": 100, "status": status, "layers": [layer], "seconds": seconds}
    network.update(roofline_seconds=0.001, accuracy=[accuracy])
    record = {"path": path, "status": status, "reason": "right", "precision": "float32", "networks": [network]}
    return {**record, "pointed": [], "compiler": [], "printed": "", "seconds_in_all": 1.0}


def gradescope(record: dict[str, Any]) -> dict[str, Any]:
    return _reports.gradescope(record, _reports.student(record))


def test_a_student_sees_the_distance_from_the_best_and_from_the_roofline():
    records = [record("a", 4, 0.4), record("b", 2, 0.2)]
    records[0]["networks"][0]["layers"][0]["seconds"]["count"] = 1
    text = _reports.render("student.html", _reports.student(records[0], records))
    assert "2.00 times the fastest of the class" in text
    assert "4.00 times the roofline" in text
    assert "93.00 % of 100 images right (sample)" in text
    assert "ms (1 run, 3.600 to 4.400; first call 12.000)" in text
    assert " runs, 1.800 to" in _reports.render("student.html", _reports.student(records[1], records))
    assert "2017 fall, layer 1: 1 x 28 x 28, 50 filters of 5 x 5" in text
    assert "50 filters of 5 x 5: 4.000 ms" in gradescope(records[0])["output"]
    bar = "".join(text.partition('class="bar"')[2].partition("</div>")[0].split("\n"))
    assert re.findall(r'class="(\w+)" style="(.*?)"', bar) == [
        ("time", "width: 100.0%"),
        ("class", "left: 62.5%; width: 25.0%"),
        ("roofline", "left: 25.0%"),
    ]


def test_a_students_page_says_what_is_wrong_where_and_what_to_do_next():
    one = record("a <b>", 4)
    one.update(status="wrong", reason="2 elements differ & more", precision=None)
    one["networks"][0].update(status="wrong")
    why = {"sentence": "It equals <y>", "line": 7, "pattern": "", "map": ["..9", "..1"]}
    one["networks"][0]["layers"][0].update(status="wrong", explanation=why)
    page = _reports.render("student.html", _reports.student(one))
    assert "2 elements differ &amp; more" in page and "a &lt;b&gt;" in page
    assert "..9\n..1" in page and "a 3 x 2 output" in page
    assert "<p>It equals &lt;y&gt;: see line 7.</p>" in page
    assert page.index("Next step") < page.index("Why it is wrong") < page.index("2017 fall")


def test_the_leaderboard_has_everyone(tmp_path):
    records = [record("fast $x", 2), record("<slow>", 9), record("failed", 1)]
    records[2].update(status="crashed", reason="why\nmore", precision=None)
    _reports.write_all(tmp_path, records, RankingSpec())
    page = (tmp_path / "leaderboard.html").read_text(encoding="utf-8")
    assert "<slow>" not in page
    for path in ("fast $x", "&lt;slow&gt;", "failed"):
        link = re.search(f'<a href="([^"]*)">{re.escape(path)}</a>', page)
        assert link is not None and f"{path}</h1>" in (tmp_path / link[1]).read_text(encoding="utf-8")
    assert "2 passed, 1 crashed" in page and ">why<" in page
    assert "width: 22.2%" in page and "left: 11.1%" in page  # 2 and the roofline's 1 of 9 ms


def test_the_times_of_a_submission_that_failed_are_no_ones_to_reach():
    records = [record("a", 4), record("fast and wrong", 1)]
    records[1]["status"] = "tampered"
    assert _reports.student(records[0], records)["networks"][0]["best_seconds"] == 0.004
    assert gradescope(records[1])["leaderboard"] == []


def test_points_of_each_network_where_no_constant_points_to_one():
    one = record("a", 4)
    other = dict(one["networks"][0], network="2018sp", status="wrong", layers=[dict(one["networks"][0]["layers"][0])])
    other["layers"][0].update(status="wrong", reason="2 elements differ")
    del other["seconds"]
    one["networks"].append(other)
    found = gradescope(one)
    assert (found["score"], [test["score"] for test in found["tests"]]) == (50, [50, 0])
    assert [test["max_score"] for test in found["tests"]] == [50, 50]
    assert found["leaderboard"] == [{"name": "2017, 100 images (ms)", "value": 4.0, "order": "asc"}]
    timed = dict(one["networks"][0], images=1000, seconds=0.02)
    del one["networks"][0]["seconds"]
    one["networks"].append(timed)  # for its times alone
    again = gradescope(one)
    assert (again["score"], [test["max_score"] for test in again["tests"]]) == (50, [50, 50])
    assert again["leaderboard"] == [{"name": "2017, 1000 images (ms)", "value": 20.0, "order": "asc"}]
    one["networks"].pop()
    one["pointed"] = ["2017"]
    found = gradescope(one)
    assert found["score"] == 100 and [test["name"] for test in found["tests"]] == ["2017, 100 images"]
    one["status"] = "wrong"
    assert gradescope(one)["score"] == 0


def rank(records: list[dict[str, Any]], rules: RankingSpec) -> list[dict[str, Any]]:
    return [place for places in _reports.rank(records, rules).values() for place in places]


def places_of(records: list[dict[str, Any]]) -> list[str]:
    """The network, the place and the path of each."""
    return [f"{one['network']}: {one['place']} {one['path']}" for one in rank(records, RankingSpec())]


NOT_RIGHT = ("wrong", "unstable", "tampered")


def test_points_by_hand():
    # Median 3, median absolute deviation 1, which is a standard deviation of 1.4826.
    places = rank([record(str(ms), ms) for ms in (5, 1, 3, 2, 4)], RankingSpec(best=100, worst=0, clamp=2))
    assert [place["path"] for place in places] == ["1", "2", "3", "4", "5"]
    assert places[0]["deviations"] == pytest.approx(2 / 1.4826)
    assert places[0]["points"] == pytest.approx(100 * (2 / 1.4826 + 2) / 4)
    assert places[2]["points"] == pytest.approx(50)


@pytest.mark.parametrize("clamp", [0.5, 0])
def test_points_are_clamped(clamp):
    places = rank([record("a", 1), record("b", 10), record("c", 10.1), record("d", 1e6)], RankingSpec(90, 60, clamp))
    assert (places[0]["points"], places[-1]["points"]) == (90, 60)


def test_other_numbers_of_images_are_ranked_by_themselves():
    few, fewer = record("few", 1), record("fewer", 2)
    few["networks"][0]["images"] = fewer["networks"][0]["images"] = 3
    expected = ["100 images: 1 a", "100 images: 2 b", "3 images: 1 few", "3 images: 2 fewer"]
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
def test_overlapping_intervals_share_a_place_and_what_is_not_right_has_none(records, places):
    assert " ".join(f"{one['path']}{one['place']}" for one in rank(records, RankingSpec())) == places


def test_classes_of_precision_are_ranked_by_themselves():
    records = [record("a", 10), record("half", 1), record("b", 20), record("wino", 5), record("halves", 2)]
    records[1]["precision"] = records[4]["precision"] = "half"
    records[3]["precision"] = "float32 by transforms"
    expected = [": 1 wino", ": 2 a", ": 3 b", ", half: 1 half", ", half: 2 halves"]
    assert places_of(records) == [f"2017, 100 images{one}" for one in expected]
    mixed = rank(records, RankingSpec(mix_precisions=True))
    assert [place["path"] for place in mixed] == ["half", "halves", "wino", "a", "b"]
