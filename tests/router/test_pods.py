"""What a real API server (1.20.2) said, byte for byte but for what no one reads."""

from __future__ import annotations

import msgspec
import pytest

from router.pods import ApiRefusedError, heard, listed

POD = b"""{"kind":"Pod","apiVersion":"v1","metadata":{"name":"p1","namespace":"gpu","resourceVersion":"2434",
"creationTimestamp":"2026-11-30T00:22:51Z","labels":{"app":"vllm"}%s},"spec":{"containers":[{"name":"vllm"}]},
"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True","lastProbeTime":null}],
"podIP":"10.0.0.1","podIPs":[{"ip":"10.0.0.1"},{"ip":"fd00::1"}],"qosClass":"BestEffort"}}"""
RUNNING = POD.replace(b"\n", b"") % b""
ENDING = POD.replace(b"\n", b"") % (
    b',"deletionTimestamp":"2026-11-30T00:13:40Z","deletionGracePeriodSeconds":30'
)
PENDING = b'{"metadata":{"name":"p2"},"status":{"phase":"Pending","qosClass":"BestEffort"}}'
EXPIRED = (
    b'{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure",'
    b'"message":"too old resource version: 1 (251)","reason":"Expired","code":410}}\n'
)
FORBIDDEN = (
    b'{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"pods is forbidden: '
    b'User \\"system:serviceaccount:gpu:warmroute\\" cannot list resource \\"pods\\" in API group \\"\\" in '
    b'the namespace \\"gpu\\"","reason":"Forbidden","details":{"kind":"pods"},"code":403}\n'
)


def pod_list(items: bytes) -> bytes:
    head = b'{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"264"},"items":'
    return head + items + b"}\n"


def event(kind: bytes, pod: bytes) -> bytes:
    return b'{"type":"' + kind + b'","object":' + pod + b"}\n"


def test_a_list_tells_where_running_pods_are_and_of_which_state_it_is() -> None:
    assert listed(pod_list(b"[" + RUNNING + b"," + PENDING + b"]")) == ({"p1": "10.0.0.1"}, "264")
    assert listed(pod_list(b"[]")) == listed(pod_list(b"null")) == ({}, "264")


def test_op01_a_pod_that_is_being_deleted_is_nowhere() -> None:
    assert listed(pod_list(b"[" + ENDING + b"]")) == ({}, "264")
    assert heard(event(b"MODIFIED", RUNNING)) == ("p1", "10.0.0.1")
    assert heard(event(b"MODIFIED", ENDING)) == ("p1", None)
    # Of a pod whose labels were changed the server says DELETED, though it runs.
    assert heard(event(b"DELETED", RUNNING)) == ("p1", None)


@pytest.mark.parametrize("phase", [b"Pending", b"Succeeded", b"Failed", b"Unknown"])
def test_a_pod_that_does_not_run_is_nowhere(phase: bytes) -> None:
    assert heard(event(b"ADDED", RUNNING.replace(b"Running", phase))) == ("p1", None)


def test_a_pod_without_an_address_is_nowhere() -> None:
    for address in (b"", b'"podIP":"",', b'"podIP":null,'):
        assert heard(event(b"ADDED", RUNNING.replace(b'"podIP":"10.0.0.1",', address))) == ("p1", None)


def test_a_bookmark_is_of_no_pod() -> None:
    bookmark = b'{"kind":"Pod","metadata":{"resourceVersion":"2434"},"spec":{"containers":null},"status":{}}'
    assert heard(event(b"BOOKMARK", bookmark)) is None


def test_an_error_event_says_its_code_and_why() -> None:
    with pytest.raises(ApiRefusedError, match="410: too old resource version") as raised:
        heard(EXPIRED)
    assert raised.value.code == 410


def test_a_refusal_says_which_right_is_missing() -> None:
    refusal = ApiRefusedError(403, FORBIDDEN)
    assert str(refusal) == (
        '403: pods is forbidden: User "system:serviceaccount:gpu:warmroute" cannot list resource "pods" '
        'in API group "" in the namespace "gpu"'
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"Too many requests, please try again later.\n", "429: Too many requests, please try again later."),
        (b'{"kind":"Status","status":"Failure"}', '429: {"kind":"Status","status":"Failure"}'),
        (b"", "429: "),
        (b"\xff" * 1000, "429: " + "\ufffd" * 200),
    ],
)
def test_a_refusal_in_another_shape_says_what_it_says(body: bytes, said: str) -> None:
    assert str(ApiRefusedError(429, body)) == said


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"metadata":{},"items":[{}]}'])
def test_what_is_no_list_and_no_event_is_told_of(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        listed(body)
    with pytest.raises(msgspec.DecodeError):
        heard(body)
