"""Templates with volumes: they stay until the last volume is deleted, and say how many there are."""

from __future__ import annotations

from fusermount3_controller.held_templates import FINALIZER, Held, Patch, message, patches

TEMPLATE = Held("s3", "uid", "7")


def test_a_template_says_how_many_volumes_it_has_and_then_stays() -> None:
    assert list(patches(TEMPLATE, 2)) == [Patch({"status": {"volumes": 2}}, of_status=True)]
    says = TEMPLATE._replace(volumes=2, finalizers=("other",))
    held = {"metadata": {"resourceVersion": "7", "finalizers": ["other", FINALIZER]}}
    assert list(patches(says, 2)) == [Patch(held)]
    assert not list(patches(says._replace(finalizers=("other", FINALIZER)), 2))


def test_it_goes_with_its_last_volume() -> None:
    ending = TEMPLATE._replace(finalizers=(FINALIZER, "other"), is_ending=True)
    let_go = {"metadata": {"resourceVersion": "7", "finalizers": ["other"]}}
    assert list(patches(ending, 0)) == [Patch(let_go)]
    assert message(ending, 1) == "it has 1 volume, and goes when the last one is deleted"
    assert message(ending, 2).startswith("it has 2 volumes")
    assert not message(ending, 0) and not message(TEMPLATE, 2)


def test_one_that_is_going_is_not_held_anew() -> None:
    """The API server takes no finalizer more then (apimachinery, ValidateObjectMetaAccessorUpdate)."""
    assert not list(patches(TEMPLATE._replace(is_ending=True, volumes=1), 1))
