"""What is read of a schema takes time in proportion to its size, whatever refers to what."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.gateway.tools.schemas import Document
from alignedserve.types import InvalidRequest
from tests.gateway.tools.test_grammars import grammar

A = {"type": "integer"}
# All of them point to the first of two schemas.
SPELLINGS = [
    f"#/{definitions}/{name}/{of}/{place}"
    for definitions in ("$defs", "%24defs", "$%64efs")
    for name in ("a", "%61")
    for of in ("anyOf", "any%4Ff")
    for place in ("0", "00", "-2", "%30")
]


class CountedDocument(Document):
    """Counts how often a reference is looked up."""

    num_looked_up = 0

    def _target(self, reference: Any, is_needed: bool = False) -> Any:
        self.num_looked_up += 1
        return super()._target(reference, is_needed)


class CountedName(str):
    """Counts how often names are compared."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.num_compared += 1
        return str.__eq__(self, other)


def test_a_definition_is_copied_once_however_it_is_spelt() -> None:
    document = Document({"$defs": {"a": {"anyOf": [A, False]}}})
    found = document.part({"type": "array", "prefixItems": [{"$ref": each} for each in SPELLINGS]})
    assert found["$defs"] == {"d0": A}
    assert found["prefixItems"] == [{"$ref": "#/$defs/d0"}] * len(SPELLINGS)


def test_alternatives_are_followed_once_however_they_are_spelt() -> None:
    """Each of the references leads to the list of all."""
    references = {"anyOf": [*({"$ref": each} for each in SPELLINGS), A]}
    document = CountedDocument({"$defs": {"a": {"anyOf": [references, False]}}})
    assert document.alternatives({"$ref": SPELLINGS[0]}) == [A]
    assert document.num_looked_up == len(SPELLINGS) + 1


def test_required_names_are_found_without_a_search() -> None:
    names = [f"a{number}" for number in range(200)]
    properties = {CountedName(name): A for name in names}
    CountedName.num_compared = 0
    found = Document({"properties": properties, "required": list(map(CountedName, names))}).arguments()
    assert [each.name for each in found.known] == names and all(each.is_required for each in found.known)
    assert CountedName.num_compared <= 10 * len(names)


def refers(definition: Any, num: int, *, are_equal: bool = False, **beside: Any) -> dict[str, Any]:
    """Returns parameters of which each refers to the definition `a`. Equal ones are gone through once."""
    to_it = {"$ref": "#/$defs/a"}
    return {
        "properties": {
            f"k{number}": to_it if are_equal else {"anyOf": [to_it, {"const": number}]}
            for number in range(num)
        },
        "$defs": {"a": definition, **beside},
    }


SHARED: dict[str, dict[str, Any]] = {
    "free texts": refers({"anyOf": [*[A] * 2000, {}]}, 300),
    "references": refers({"anyOf": [{"$ref": "#/$defs/b"}] * 2000}, 300, b={"type": "string"}),
    "nothing": refers({"anyOf": [*[False] * 4000, {}]}, 300),
    "texts": refers({"type": ["string", "integer"], "enum": [str(number) for number in range(2000)]}, 300),
    "a long text": refers({"type": ["string", "array"], "const": f"[{'1, ' * 100_000}1]"}, 300),
    "parts": refers({"anyOf": [{"allOf": [A] * 2000}, {}]}, 300),
    "large numbers": refers({"enum": [10**4000] * 20}, 300),
}


@pytest.mark.parametrize("parameters", SHARED.values(), ids=SHARED)
def test_what_is_read_again_and_again_is_bounded(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="refers to large parts of itself too often"):
        grammar("qwen-coder", parameters, max_bytes=1 << 30)


def test_a_definition_that_many_arguments_share_is_no_reason_to_refuse() -> None:
    fields = {f"field_{number}": {"type": ["number", "null"]} for number in range(80)}
    filters = {
        "type": "object",
        "properties": fields | {"all": {"type": "array", "items": {"$ref": "#/$defs/a"}}},
    }
    assert grammar("qwen-coder", refers(filters, 80, are_equal=True), max_bytes=1 << 20)


def test_a_long_reference_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_followed, plain = 0, Document._looked_up

    def counted(self: Document, reference: str) -> Any:
        nonlocal num_followed
        num_followed += 1
        return plain(self, reference)

    monkeypatch.setattr(Document, "_looked_up", counted)
    long = {"type": "integer", "allOf": [{"$ref": "#/%24defs/b/anyOf/" + 400 * "%30"}] * 10}
    definitions = {f"to{number}": {"$ref": "#/$defs/a"} for number in range(50)} | {
        "a": long,
        "b": {"anyOf": [A]},
    }
    properties = {f"k{number}": {"$ref": f"#/$defs/to{number}"} for number in range(50)}
    assert grammar("pythonic", {"properties": properties, "$defs": definitions})
    assert num_followed <= 2 * 50 + 10


def test_references_to_nothing_are_equal_to_none_that_leads_somewhere() -> None:
    properties = {name: {"$ref": f"#/$defs/{name}"} for name in ("any", "missing")}
    for names in (("any", "missing"), ("missing", "any")):
        parameters = {"properties": {name: properties[name] for name in names}, "$defs": {"any": True}}
        with pytest.raises(InvalidRequest, match="points to nothing"):
            grammar("pythonic", parameters)
