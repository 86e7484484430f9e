"""The key of shared filesystems: what differs, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusermount3_broker.messages.sharing_key import LENGTH, sharing_key

USE: dict[str, Any] = {
    "volume": "bucket",
    "attributes": {"volumeTemplate": "s3", "bucket": "b"},
    "mount_options": ["ro", "allow_other"],
    "group": 1000,
    "identity": ("team", "reader"),
}

#: Whoever changes how the key is computed needs a controller that offers both keys while nodes are updated.
VECTORS = [
    (USE, "598c4bab"),
    ({"volume": "", "attributes": {"volumeTemplate": "s3"}}, "a5058723"),
    ({"volume": "disk", "attributes": {"volumeTemplate": "disks"}, "block": True}, "dca1b787"),
]


@pytest.mark.parametrize(("use", "begin"), VECTORS)
def test_the_key_never_changes(use: dict[str, Any], begin: str) -> None:
    key = sharing_key(**use)
    assert len(key) == LENGTH
    assert key.startswith(begin)


@pytest.mark.parametrize(
    "change",
    [
        {"volume": "another"},
        {"volume": ""},
        {"attributes": {"volumeTemplate": "other", "bucket": "b"}},
        {"attributes": {"volumeTemplate": "s3", "bucket": "c"}},
        {"attributes": {"volumeTemplate": "s3"}},
        {"mount_options": []},
        {"mount_options": ["allow_other", "ro"]},
        {"mount_options": ["ro,allow_other"]},
        {"group": 0},
        {"group": None},
        {"identity": ("team", "writer")},
        {"identity": ("other", "reader")},
        {"identity": None},
        {"block": True},
    ],
)
def test_each_difference_gives_another_key(change: dict[str, Any]) -> None:
    assert sharing_key(**{**USE, **change}) != sharing_key(**USE)


def test_attributes_of_kubernetes_and_their_order_make_no_difference() -> None:
    attributes = {
        "csi.storage.k8s.io/pod.uid": "1",
        "storage.kubernetes.io/csiProvisionerIdentity": "x",
        **dict(reversed(USE["attributes"].items())),
    }
    assert sharing_key(**{**USE, "attributes": attributes}) == sharing_key(**USE)


TEXTS = st.text(max_size=5)
USES = st.tuples(
    TEXTS,
    st.dictionaries(TEXTS.filter(lambda name: "/" not in name), TEXTS, max_size=3),
    st.lists(TEXTS, max_size=3),
    st.none() | st.integers(0, 3),
    st.none() | st.tuples(TEXTS, TEXTS),
)


@given(USES, st.booleans(), USES, st.booleans())
def test_no_two_uses_have_the_same_key(one: Any, is_block: bool, other: Any, other_is_block: bool) -> None:
    keys = sharing_key(*one, block=is_block), sharing_key(*other, block=other_is_block)
    assert (keys[0] == keys[1]) == ((one, is_block) == (other, other_is_block))
