"""A process that goes wrong: all others end with an error that names it and the call, soon."""

import os
import re
import signal

import broken_processes
import processes
import pytest
import torch

import funcpar as fp

thorough = pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "thorough", reason="a long campaign")
# Seconds: the limit given to the processes, the grace in which they look for each other, and starting them.
BOUND = broken_processes.TIMEOUT + 2 + 25
GONE = r"pmap\(loss_fn\): process {last} of {count} is gone \(.*\):"

FAULTS = {
    "kill": ("ProcessFailedError", GONE),
    "exit": ("ProcessFailedError", GONE),
    "raise outside": ("ProcessFailedError", GONE),
    "hang": (
        "CollectiveTimeoutError",
        r"process {last} of {count} did not come within 3 seconds|more than 3 seconds apart",
    ),
    "leave": ("ProcessFailedError", GONE + r".*process {last} has left: shutdown\(\)"),
    "forward": ("ProcessFailedError", r"process {last} .*failed in pmap\(loss_fn\): ValueError: no forward"),
    "backward": (
        "ProcessFailedError",
        r"process {last} .*failed in pmap\(loss_fn\): ValueError: no backward",
    ),
    "other call": ("ReplicaMismatchError", r"process 1 (is|waits) in .*pmap\(<lambda>\)"),
    "shape": ("ReplicaMismatchError", r"w  float32\[3\] in process 0|waits in pmap\(loss_fn\)"),
}
# What the others need not wait for the limit to notice.
AT_ONCE = {"kill", "exit", "raise outside", "leave"}
OFTEN = [
    ("kill", 2), ("raise outside", 0), ("raise outside", 2), ("leave", 2),
    ("hang", 2), ("forward", 2), ("backward", 2), ("other call", 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "when", "count", "devices"),
    [(fault, when, 2, 1) for fault, when in OFTEN]
    + [
        pytest.param(fault, when, count, devices, marks=thorough)
        for fault in FAULTS
        for when in (0, 1, 3)
        for count, devices in ((2, 2), (3, 1))
        if count == 2 or fault not in ("other call", "shape")
    ],
)
def test_a_process_that_goes_wrong_ends_the_others_with_an_error(fault, when, count, devices):
    limit = 60.0 if fault in AT_ONCE else broken_processes.TIMEOUT
    outcomes = processes.run(broken_processes.train, count, fault, when, devices, limit, timeout=BOUND)
    *others, last = outcomes
    kind, message = FAULTS[fault]
    for outcome in others:
        assert outcome.error is None and outcome.exitcode == 0, outcome
        name, text, seconds = outcome.value
        assert re.fullmatch(kind, name), text
        assert re.search(message.format(last=count - 1, count=count), text, re.DOTALL), text
        assert seconds < (10 if fault in AT_ONCE else BOUND)
    assert (last.exitcode == -signal.SIGKILL) == (fault == "kill")


def test_processes_go_on_after_a_call_that_failed_in_one_of_them():
    first, second = processes.values(broken_processes.recover, 2)
    fails = "ValueError: not this time"
    assert second == [3.0, fails, 3.0, fails, 3.0] * 2 + [24.0, fails, 24.0, fails, 24.0]
    for place, (told, answer) in enumerate(zip(first, second, strict=True)):
        if place % 5 % 2:
            assert told.startswith("ProcessFailedError: ")
            assert "process 1 of 2 failed in pmap(" in told and "ValueError: not this time" in told
        else:
            assert told == answer


MESSAGES = {
    "shape": r"pmap\(<lambda>\): the processes give different structures, shapes or numbers:\n"
    r"  p\['b'\]  float32\[1\] in process 0, float32\[2\] in process 1\nBuild the same model in every",
    "structure": r"  p\['more'\]  missing in process 0, float32\[1\] in process 1",
    "number": r"  lr  0\.1 in process 0, 0\.2 in process 1",
    "broadcast": r"\n  values\['w'\]  float32\[3\] in process 0, float64\[3\] in process 1",
    "names": r"outputs:\n  process 0 returned output\['b'\]\n  process 1 returned output\['a'\]",
    "values": r"  output  differs from process to process\nReturn the same from every shard",
    "kinds": r"  output  the same on all shards in process 0, rows of each process in process 1",
    "collective": r"process 0 is in psum\(float32\[\]\) in pmap\(<lambda>\)\n  process 1 is in pmax\(",
    "early": r"process 0 is in psum\(float32\[\]\) in pmap\(<lambda>\)\n  process 1 is in the end of",
    "closed over": r"  closed-over tensor 0  float32\[\] with .* in process 0, float32\[3\] with .* in",
    "part of a graph": r"  the results  plain in process 0, part of a graph in process 1",
    "functions": r"  the function  .*<lambda>, line \d+ of broken_processes\.py, code \w+ in process 0, ",
    "experts": r"  closed-over tensor 0  float32\[3\] with values \w+ in process 0, float32\[3\] with values",
    "signs": r"  output  differs from process to process",
    "transformed": r"it closes over a tensor that a torch\.func.*\nPass that tensor as an argument\.",
    "check": r"check\(pmap\(<lambda>\)\): the mapped function has the rows of all processes.*\nCheck pmap",
    "closed over, fused": r"the value depends on a tensor that requires a gradient and is no argument, .*\n"
    r"Detach that tensor, pass it as an argument, or make the call under torch\.no_grad\(\)\.",
}


OTHERS = {"closed over, fused": "RuntimeError", "transformed": "ValueError", "check": "RuntimeError"}


def test_a_mismatch_is_an_error_in_all_processes_that_names_what_differs():
    for found in processes.values(broken_processes.mismatches, 2):
        assert found.pop("afterwards") == ("", "12.0")
        assert set(found) == set(MESSAGES)
        for name, (kind, message) in found.items():
            assert kind == OTHERS.get(name, "ReplicaMismatchError") and re.search(MESSAGES[name], message), (
                name,
                kind,
                message,
            )


def test_a_backward_that_one_process_does_not_run_is_an_error():
    outcomes = processes.run(broken_processes.backward, 2, timeout=BOUND)
    assert all(outcome.value[0] for outcome in outcomes), outcomes
    assert (
        "process 0 is in the backward of pmap(<lambda>)\n  process 1 is in pmap(<lambda>)"
        in (outcomes[0].value[1])
    )


def test_two_threads_cannot_make_spanning_calls_at_once():
    for told in processes.values(broken_processes.other_thread, 2):
        assert re.search(r"another thread of this process is in a call that spans all processes.*\n", told)


def test_what_cannot_be_joined_is_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(
        ValueError, match=r"initialize: timeout=0 is not a positive number of seconds\.\nGive"
    ):
        fp.distributed.initialize(timeout=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"initialize: the environment lacks MASTER_ADDR.*\nStart the program"
    ):
        fp.distributed.initialize()
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(RuntimeError, match=r"torchrun has restarted this program.*\nSet TORCH_DISABLE_SHARE"):
        fp.distributed.initialize()
    with pytest.raises(ValueError, match=r"broadcast: source=1, and there are 1 processes\.\nGive a number"):
        fp.distributed.broadcast(torch.ones(1), source=1)
    with pytest.raises(
        ValueError, match=r"pmap\(.*\): processes='some' is unknown\.\nGive \"all\" or \"local\""
    ):
        fp.pmap(lambda x: x, processes="some")


def test_joining_twice_is_refused():
    assert (
        processes.values(broken_processes.joined_twice, 2)
        == ["initialize: the processes are joined already."] * 2
    )


def test_calls_of_different_number_are_never_paired():
    first, second = (
        outcome.value for outcome in processes.run(broken_processes.out_of_step, 2, timeout=BOUND)
    )
    assert first[0] == second[0] == "3.0"
    assert second[1].startswith("ValueError: pmap(<lambda>): mapped arguments disagree")
    # Process 1's third call is none of those that process 0 makes.
    assert re.search("process 0 is in .*, its call 2 .*\n.*process 1 is in .*, its call 3 ", first[1])
    assert "Error: " in first[2] and "Error: " in second[2]


def test_gradients_in_half_precision_survive_a_change_of_rows():
    for found in processes.values(broken_processes.half_precision, 2):
        assert all(abs(grad - 0.5) < 1e-2 for grad in found), found
