"""Groups with sums, and trees."""

from __future__ import annotations

from typing import Any

from gpumond.facts.program import ProcessKey
from gpumond.top.processes import Ancestor, SortOrder, grouped, table_rows, tree
from gpumond.view.frame import view
from tests.helpers.agents import GIB
from tests.helpers.frames import fake_daemon, make_frame
from tests.helpers.screens import top
from tests.helpers.values import make_device, make_pool, make_process, make_report

USERS = {1: "analysis", 2: "research", 3: "analysis", 4: None}
SIZES = {1: GIB, 2: 2 * GIB, 3: 3 * GIB, 4: 5 * GIB}


def four(**fields: Any) -> dict[str, Any]:
    """The third process has an agent that reports 1 GiB of cache."""
    processes = tuple(
        make_process(
            pid,
            SIZES[pid],
            user=user,
            comm="python",
            pod_name="trainer-0" if pid < 3 else None,
            pod_namespace="ml",
        )
        for pid, user in USERS.items()
    )
    report = make_report(3, (make_pool(live=GIB, cached=GIB),), workload="train")
    return make_frame(make_device(used_bytes=11 * GIB, processes=processes), reports=(report,), **fields)


ROWS = view(four()).processes


def test_group_has_the_sums_of_its_members():
    analysis, research, unknown = sorted(grouped(ROWS, "user"), key=lambda group: group.process.program)
    assert [group.process.program for group in (analysis, research, unknown)] == [
        "analysis (2)",
        "research (1)",
        "unknown user (1)",
    ]
    assert analysis.process.used_bytes == 4 * GIB
    assert analysis.process.shares["cached"] == GIB
    assert research.process.shares["cached"] is None
    assert sorted(row.pid for row in analysis.processes) == [1, 3]


def test_processes_are_grouped_by_workload_and_by_container():
    assert {group.process.program for group in grouped(ROWS, "workload")} == {"python (3)", "train (1)"}
    assert {group.process.program for group in grouped(ROWS, "container")} == {"ml/trainer-0 (2)", "no container (2)"}


def test_groups_are_sorted_by_their_sums_and_members_follow_an_opened_one():
    groups = [*table_rows(ROWS, SortOrder(), "", "user", (), {})]
    assert [row.process.program for row in groups] == ["unknown user (1)", "analysis (2)", "research (1)"]
    opened = [*table_rows(ROWS, SortOrder(), "", "user", {groups[1].key}, {})]
    assert [(row.process.pid, row.depth) for row in opened] == [(0, 0), (0, 0), (3, 1), (1, 1), (0, 0)]
    assert [row.process.pid for row in table_rows(ROWS, SortOrder("pid", True), "", "", (), {})] == [1, 2, 3, 4]


def test_tree_shows_children_below_the_nearest_ancestor_with_memory():
    """3 is an ancestor of 1; 2 and 4 are children of a program without memory, pid 90."""
    keys = {row.pid: row.key[1] for row in ROWS}
    shell, launcher = Ancestor(50, "bash"), Ancestor(90, "torchrun")
    lineage = {
        keys[1]: (Ancestor(70, "sh"), Ancestor(3, "train"), shell),
        keys[2]: (launcher, shell),
        keys[3]: (shell,),
        keys[4]: (launcher, shell),
    }
    rows = tree(sorted(ROWS, key=lambda row: -row.pid), lineage)
    assert [(row.process.program, row.process.pid, row.depth) for row in rows] == [
        ("torchrun", 90, 0),
        ("python", 4, 1),
        ("python", 2, 1),
        ("train", 3, 0),
        ("python", 1, 1),
    ]
    assert rows[0].process.used_bytes == 7 * GIB


def test_tree_without_known_ancestors_is_a_list():
    rows = tree(ROWS, {ProcessKey(1, 100): ()})
    assert [(row.process.pid, row.depth) for row in rows] == [(row.pid, 0) for row in ROWS]


def test_key_g_groups_enter_opens_a_group_and_space_marks_its_members():
    with fake_daemon(four()) as fake, top(fake.url, size=(100, 30)) as session:
        session.shows("python", "train")
        session.press("g")
        session.shows("analysis (2)", "research (1)", "unknown user (1)", "4.0 GiB", without="train ")
        session.press("down", "enter")
        session.until(lambda screen: any(line.split()[1:3] == ["3", "train"] for line in screen.splitlines()))
        session.press(" ")
        session.until(lambda screen: sum(line.startswith("*") for line in screen.splitlines()) == 3)
        session.press("g")
        session.shows("train (1)", "python (3)")
        session.press("g")
        session.shows("ml/trainer-0 (2)", "no container (2)")
        session.press("g")
        session.until(lambda screen: sum(line.startswith("*") for line in screen.splitlines()) == 2)
