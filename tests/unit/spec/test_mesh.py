"""A mesh lays ranks out on named axes; its name says it, and a name that says none is refused in a sentence."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.spec import Job, Mesh, parse_mesh
from paceline.spec.plan import AXES, AxisName, check_mesh

DEGREE = st.integers(1, 4)
MESHES = st.builds(Mesh, dp=DEGREE, fsdp=DEGREE, tp=DEGREE, pp=DEGREE, zero_stage=st.integers(1, 3))


@given(MESHES)
def test_every_place_is_taken_once_and_the_last_axis_runs_fastest(mesh: Mesh) -> None:
    places = [tuple(mesh.place(rank)[axis] for axis in AXES) for rank in range(mesh.num_workers)]
    assert places == sorted(set(places))
    assert all(place[i] < mesh.degree(axis) for place in places for i, axis in enumerate(AXES))
    assert AXES[-1] == "tp" and AXES[0] == "pp"  # tensor groups send most, so they are neighbours


@given(MESHES)
def test_every_assignment_belongs_to_one_copy_of_the_model_with_one_leader(mesh: Mesh) -> None:
    ranks = range(mesh.num_workers)
    assert Counter(map(mesh.assignment_index, ranks)) == dict.fromkeys(range(mesh.dp * mesh.fsdp), mesh.tp * mesh.pp)
    assert sorted(mesh.assignment_index(rank) for rank in ranks if mesh.leads_assignment(rank)) == list(
        range(mesh.dp * mesh.fsdp)
    )


@given(MESHES)
def test_the_name_of_a_mesh_names_it(mesh: Mesh) -> None:
    if mesh.num_workers > 1:
        named = parse_mesh(str(mesh), mesh.num_workers)
        assert [named.degree(axis) for axis in AXES] == [mesh.degree(axis) for axis in AXES]
        assert mesh.fsdp == 1 or named.zero_stage == mesh.zero_stage


@given(st.sampled_from(AXES), DEGREE, DEGREE)
def test_an_axis_without_a_degree_takes_the_workers_that_are_left(axis: AxisName, left: int, known: int) -> None:
    other: AxisName = "tp" if axis != "tp" else "pp"
    for text in (f"{axis} x {other}{known}", f"{other}{known}x{axis.upper()}", f" {axis}, {other}:{known} "):
        mesh = parse_mesh(text, left * known)
        assert (mesh.degree(axis), mesh.degree(other), mesh.num_workers) == (left, known, left * known)


@pytest.mark.parametrize(
    ("text", "workers", "nodes", "mesh"),
    [
        ("dp", 4, 1, Mesh(dp=4)),
        ("fsdp", 8, 2, Mesh(fsdp=8)),
        ("zero1", 4, 1, Mesh(fsdp=4, zero_stage=1)),
        ("zero2", 4, 1, Mesh(fsdp=4, zero_stage=2)),
        ("pp", 3, 1, Mesh(pp=3)),
        ("tp", 2, 1, Mesh(tp=2)),
        ("hsdp", 8, 1, Mesh(dp=2, fsdp=4)),
        ("hsdp", 8, 2, Mesh(dp=2, fsdp=4)),
        ("hsdp", 8, 4, Mesh(dp=4, fsdp=2)),
        ("DP2 x PP2", 4, 1, Mesh(dp=2, pp=2)),
        ("fsdp2xtp2", 4, 1, Mesh(fsdp=2, tp=2)),
        ("dp2*fsdp2*tp2*pp2", 16, 1, Mesh(dp=2, fsdp=2, tp=2, pp=2)),
    ],
)
def test_named_strategies(text: str, workers: int, nodes: int, mesh: Mesh) -> None:
    assert parse_mesh(text, workers, nodes) == mesh


@given(st.text(max_size=12), st.integers(1, 8))
@example("\n", 1)
def test_any_other_text_is_refused_in_a_sentence(text: str, num_workers: int) -> None:
    try:
        mesh = parse_mesh(text, num_workers)
    except JobError as problem:
        assert str(problem).endswith(".") and "\n" not in str(problem)
    else:
        assert mesh.num_workers == num_workers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fdsp", ["'fdsp'", "'fsdp'"]),
        ("ddp", ["'ddp'", "'dp'"]),
        ("", ["''"]),
        ("dp2 x dp2", ["axis once"]),
        ("dp x fsdp", ["at most one degree out"]),
        ("dp0 x fsdp", ["4 workers"]),
        ("dp-2", ["'dp-2'"]),
        ("dp٣", ["'dp٣'"]),
        ("dp3 x pp", ["4 workers"]),
        ("dp8", ["4 workers"]),
        ("fsdp x tp8", ["4 workers"]),
        ("zero2 x fsdp2", ["axis once"]),
        ("zero4", ["'zero4'"]),
        ("dp99999999999", ["dp99999999999"]),
    ],
)
def test_a_name_that_makes_no_mesh_of_four_is_refused_with_the_reason(text: str, words: list[str]) -> None:
    with pytest.raises(JobError) as caught:
        parse_mesh(text, 4)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"aggregation": {"method": "diloco"}}, ["'diloco'", "'every_step'"]),
        ({"aggregation": {"method": "parameter_server_async"}}, ["'parameter_server_async'"]),
        ({"precision": "float16"}, ["'float16'", "'bfloat16'"]),
    ],
)
def test_what_needs_whole_replicas_is_refused_on_other_meshes(settings: dict[str, object], words: list[str]) -> None:
    job = Job.from_mapping(settings)
    check_mesh(job, Mesh(dp=4))
    for mesh in (Mesh(fsdp=4), Mesh(tp=2), Mesh(pp=2), Mesh(dp=2, fsdp=2)):
        with pytest.raises(JobError) as caught:
            check_mesh(job, mesh)
        assert all(word in str(caught.value) for word in (*words, str(mesh))), caught.value
