"""A mesh's places and shares, and the words that name one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.spec import Mesh, parse_mesh
from paceline.spec.mesh import AXES

DEGREE = st.integers(1, 4)
MESHES = st.builds(Mesh, dp=DEGREE, fsdp=DEGREE, tp=DEGREE, pp=DEGREE, zero_stage=st.integers(1, 3))


@given(MESHES)
def test_every_place_is_taken_once(mesh: Mesh) -> None:
    places = [tuple(mesh.place(rank)[axis] for axis in AXES) for rank in range(mesh.num_workers)]
    assert places == sorted(set(places))  # the last axis runs fastest
    assert all(place[i] < mesh.degree(axis) for place in places for i, axis in enumerate(AXES))


@given(MESHES)
def test_every_share_is_had_by_one_copy_of_the_model_and_led_by_one_worker(mesh: Mesh) -> None:
    ranks = range(mesh.num_workers)
    assert Counter(map(mesh.share, ranks)) == dict.fromkeys(range(mesh.num_assignments), mesh.tp * mesh.pp)
    assert sorted(mesh.share(rank) for rank in ranks if mesh.leads_assignment(rank)) == list(
        range(mesh.num_assignments)
    )


@given(MESHES)
def test_what_a_mesh_is_called_names_it(mesh: Mesh) -> None:
    if mesh.num_workers > 1:
        named = parse_mesh(str(mesh), mesh.num_workers)
        assert [named.degree(axis) for axis in AXES] == [mesh.degree(axis) for axis in AXES]
        assert mesh.fsdp == 1 or named.zero_stage == mesh.zero_stage


@given(st.sampled_from(["dp", "fsdp", "tp", "pp"]), DEGREE, DEGREE)
def test_an_axis_without_a_degree_takes_the_workers_that_are_left(axis: str, left: int, known: int) -> None:
    other = "tp" if axis != "tp" else "pp"
    for text in (f"{axis} x {other}{known}", f"{other}{known}x{axis.upper()}", f" {axis}, {other}:{known} "):
        mesh = parse_mesh(text, left * known)
        assert (mesh.degree(axis), mesh.degree(other), mesh.num_workers) == (left, known, left * known)  # type: ignore[arg-type]


@given(st.text(max_size=12), st.integers(1, 8))
def test_any_other_text_is_refused_in_a_sentence(text: str, num_workers: int) -> None:
    try:
        mesh = parse_mesh(text, num_workers)
    except JobError as problem:
        assert str(problem).endswith(".")
    else:
        assert mesh.num_workers == num_workers


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_hsdp_replicates_over_nodes(nodes: int) -> None:
    assert parse_mesh("hsdp", 8, nodes) == Mesh(dp=max(nodes, 2), fsdp=8 // max(nodes, 2))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fdsp", "no strategy 'fdsp'"),
        ("", "no strategy ''"),
        ("dp2 x dp2", "every axis once"),
        ("dp x fsdp", "leave at most one degree out"),
        ("dp0 x fsdp", "gives dp the degree 0; a degree is 1 or more"),
        ("dp0", "gives dp the degree 0"),
        ("dp3 x pp", "does not make 4 workers"),
        ("fsdp x tp8", "does not make 4 workers"),
        ("zero2 x fsdp2", "every axis once"),
        ("auto", "name a mesh here"),
        ("dp_one_process", "name a mesh here"),
    ],
)
def test_what_cannot_be_meant(text: str, why: str) -> None:
    with pytest.raises(JobError, match=why):
        parse_mesh(text, 4)
