"""Both sides of a gloo pair in real processes: what arrives is verified, what breaks is noticed, a new pair works."""

import contextlib
import itertools
import time

import psutil
import pytest
import torch

from inflight_runtime.weights.packing import plan_buckets
from inflight_runtime.weights.receiver import (
    DigestMismatchError,
    PausedBucketReceiver,
    StagedReceiver,
    WeightTransferError,
)
from inflight_runtime.weights.transports.pair import serve_store
from support import weight_peers as peer

tags = itertools.count()


@pytest.fixture
def receiving_from(processes, port):
    """Opens a pair, rank 1, whose sender is a process that behaves as named."""

    @contextlib.contextmanager
    def open_pair(behaviour):
        tag = f"t{next(tags)}"
        with peer.running(processes, peer.play, port, tag, 0, behaviour) as sender:
            pair = peer.join(port, tag, 1, 60.0)
            yield pair, peer.update_request(peer.snapshot(1), tag, 30.0), sender
            pair.close()

    return open_pair


def assert_is_version_1(tensors):
    expected = peer.weights(1)
    assert [name for name, _ in tensors] == list(expected)
    for name, tensor in tensors:
        assert torch.equal(tensor, expected[name])


def test_all_buckets_arrive_and_are_verified(receiving_from):
    with receiving_from("whole") as (pair, request, child):
        assert_is_version_1(StagedReceiver().receive(pair, request))
        child.join(30)
        assert child.exitcode == 0


def test_a_corrupted_byte_is_refused_by_name(receiving_from):
    with (
        receiving_from("corrupt") as (pair, request, _),
        pytest.raises(DigestMismatchError, match=r"update 1.1: 1 of 4 tensors did not arrive as sent \(first: norm\)"),
    ):
        StagedReceiver().receive(pair, request)


def test_a_manifest_that_does_not_fit_its_digest_is_refused_before_anything_is_received(receiving_from):
    with receiving_from("whole") as (pair, request, _):
        changed = request.model_copy(deep=True)
        changed.tensors[0].shape = [64, 300]
        with pytest.raises(DigestMismatchError, match="nothing was committed"):
            StagedReceiver().receive(pair, changed)
        assert_is_version_1(StagedReceiver().receive(pair, request))


def test_a_sender_killed_in_the_middle_is_noticed_and_a_new_pair_works(receiving_from):
    receiver = StagedReceiver()
    with receiving_from("die") as (pair, request, _), pytest.raises(WeightTransferError, match=r"t\d+"):
        receiver.receive(pair, request)
    with receiving_from("whole") as (pair, request, _):
        assert_is_version_1(receiver.receive(pair, request))


def test_a_silent_sender_costs_the_receiver_its_deadline_and_no_more(receiving_from):
    with receiving_from("hang") as (pair, request, _):
        request.timeout_seconds = 1.0
        begun = time.monotonic()
        with pytest.raises(WeightTransferError):
            StagedReceiver().receive(pair, request)
        assert time.monotonic() - begun < 15.0  # far below the sender's silence and the pair's own timeout


def test_a_receiver_killed_in_the_middle_is_noticed_by_the_sender(processes, port):
    tag = f"t{next(tags)}"
    data = peer.snapshot(1)
    with peer.running(processes, peer.play, port, tag, 1, "die"):
        pair = peer.join(port, tag, 0, 30.0)
        with pytest.raises(WeightTransferError):
            for _ in range(3):
                pair.broadcast(data.flat[: peer.BUCKET_BYTES])
        pair.close()


def test_closing_one_side_ends_the_waiting_of_the_other(receiving_from):
    with receiving_from("hang") as (pair, request, child):
        first = torch.empty(plan_buckets(request.tensors, peer.BUCKET_BYTES)[0].size, dtype=torch.uint8)
        pair.broadcast(first)
        child.kill()
        with pytest.raises(WeightTransferError):
            pair.broadcast(first)
        pair.close()
        with pytest.raises(WeightTransferError, match="is closed"):
            pair.broadcast(first)


def test_nobody_there_is_a_failed_join_within_its_deadline(port):
    with pytest.raises(WeightTransferError, match="cannot join the weight group 'alone'"):
        peer.join(port, "alone", 1, 1.0)


def test_two_pairs_share_a_rendezvous_and_do_not_wait_for_each_other(receiving_from):
    with (
        receiving_from("hang") as (silent, _, _),
        receiving_from("whole") as (lively, request, _),
    ):
        assert_is_version_1(StagedReceiver().receive(lively, request))
        assert not silent.closed


def test_tensors_still_held_survive_the_next_update_and_scratch_is_reused_otherwise(receiving_from):
    receiver = StagedReceiver()
    places = []
    held = None
    for _ in range(3):
        with receiving_from("whole") as (pair, request, _):
            tensors = receiver.receive(pair, request)
        places.append(tensors[0][1].data_ptr())
        if held is None:
            held = tensors[0][1]  # as a commit that has not ended
        else:
            tensors.clear()
    assert places[0] not in places[1:]
    assert places[1] == places[2]
    assert torch.equal(held, peer.weights(1)["embed"])


def test_a_paused_receiver_yields_tensors_bucket_by_bucket(receiving_from):
    with receiving_from("whole") as (pair, request, _):
        got = [
            [(name, tensor.clone()) for name, tensor in tensors]
            for tensors in PausedBucketReceiver().receive(pair, request, "cpu")
        ]
    assert [[name for name, _ in tensors] for tensors in got] == [["embed"], ["up", "down"], ["norm"]]
    assert_is_version_1([entry for tensors in got for entry in tensors])


def test_a_rendezvous_that_is_gone_is_a_failed_join():
    store, gone = serve_store("127.0.0.1")
    del store
    with pytest.raises(WeightTransferError, match="cannot join"):
        peer.join(gone, "x", 1, 1.0)


def test_the_rendezvous_listens_on_the_named_address_alone():
    store, port = serve_store("127.0.0.1")
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.laddr.port == port and not c.raddr]
    assert [address.ip for address in listening] == ["127.0.0.1"]
    del store
