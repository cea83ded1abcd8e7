"""Which modules import which: what ``lint-imports`` does not see. Imports for type checkers only and those inside functions count."""

from pathlib import Path

import pytest
from import_graph import circles, graph, imported

from penstock.call.families import families

FAMILIES = {one.name: one for one in families()}
PACKAGES = tuple(f"penstock.{name}" for name in FAMILIES)
NAMING = {
    "penstock": "the public functions",
    "penstock.layers.sequences": "layers call the public functions of their recurrence",
    "penstock.layers.softmax_attention": "the layer of softmax attention",
    "penstock.layers.attention_pages": "the same over pages",
    "penstock.compat.fla": "other projects' names on the public functions",
    "penstock.compat.fla_call": "an option of the delta rule that other projects' functions declare",
    "penstock.compat.fla_delta": "other projects' names on the public functions",
    "penstock.compat.flash_rwkv": "other projects' names on the public functions",
    "penstock.compat.transformers": "other projects' names on the public functions",
    "penstock.compat.transformers_delta": "other projects' names on the public functions",
}
"""The modules outside the families that import from one, and why they may. All others loop over the registered families."""


def of_families(modules: set[str]) -> set[str]:
    return {name for name in modules if name.startswith(PACKAGES)}


def test_only_listed_modules_name_a_family():
    """A second family of recurrences is added without touching others. The list has no module that no longer names one."""
    naming = {module for module, others in graph().items() if not module.startswith(PACKAGES) and of_families(others)}
    assert naming == NAMING.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_families_do_not_import_each_other(name):
    mine = f"penstock.{name}"
    others = {other for module, imports in graph().items() if module.startswith(mine) for other in of_families(imports)}
    assert not {other for other in others if not other.startswith(mine)}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_register_in_their_package(name):
    assert f"penstock.{name}.registration" in graph()
    assert all(function.__module__.startswith(f"penstock.{name}.") for function in FAMILIES[name].functions.values())


@pytest.mark.parametrize("test", ["call/test_third_family.py", "tokens/test_family_with_states.py"])
def test_families_of_tests_need_tokens_and_the_frame_only(test):
    found = imported(Path(__file__).parent / test, "tests.one")
    below = {name for name in found if name.startswith(("penstock.call", "penstock.tokens"))}
    assert {"penstock.call.families", "penstock.tokens.packing"} <= below
    assert not of_families(found)
    assert not of_families(reached(below))


def reached(modules: set[str]) -> set[str]:
    """These modules and all that they import, directly or not."""
    found, new = set(modules), set(modules)
    while new:
        new = {other for module in new for other in graph()[module]} - found
        found |= new
    return found


def test_modules_import_each_other_in_no_circle():
    assert not circles(graph())


def test_circles_are_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(edges) == [["b", "c"]]
    assert circles(edges | {"d": {"a"}}) == [["a", "b", "c", "d"]]


def test_the_graph_has_imports_of_all_kinds(tmp_path):
    """Absolute, relative, inside functions and for type checkers; of modules and of names."""
    path = tmp_path / "one.py"
    path.write_text(
        "import penstock.errors\nfrom ..call import private\nfrom . import checkpoints\n"
        "if TYPE_CHECKING:\n    from ..cores import affinity\n"
        "def f():\n    from ...penstock.files import read_text\n"
    )
    wanted = {"errors", "call.private", "models.checkpoints", "cores"}
    assert imported(path, "penstock.models.one") >= {f"penstock.{name}" for name in wanted}
