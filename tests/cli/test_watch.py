"""anatomy --watch: another command runs as it would by itself, and what it held is told on stderr."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time

import jsonschema
import pytest

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and terminals are tested on Linux")
WATCH = [sys.executable, "-m", "fullbatch", "anatomy", "--watch", "--on", "cpu", "--every", "0.1"]
HELD = 200_000_000
HOLDS = f"import time; held = b'x' * {HELD}; time.sleep(1)"
SAYS_ITS_SIGNALS = """
import signal, sys, time
def told(number, frame):
    print("told", number, flush=True)
    if number == signal.SIGTERM:
        sys.exit(9)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, told)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def test_the_peak_of_a_command_is_found_and_its_exit_code_and_stdout_are_its_own(fullbatch, schema):
    code = f"import sys; print('mine', sys.argv[1]); {HOLDS}; sys.exit(7)"
    done = fullbatch(
        "anatomy", "--watch", "--on", "cpu", "--every", "0.1", "--json", "w.json", "--", sys.executable, "-c", code, "--top"
    )
    assert (done.returncode, done.stdout) == (7, "mine --top\n"), done.stderr
    outputs = fullbatch.folder / "outputs"
    written = json.loads((outputs / "watch.json").read_text())
    jsonschema.validate(written, schema("watch.v1"))
    assert written == json.loads((fullbatch.folder / "w.json").read_text())
    assert HELD <= written["peak_bytes"] < HELD + 60e6  # the rest is the interpreter
    assert 0 < written["peak_at_seconds"] < written["seconds"]
    assert (written["exit_code"], written["ended_by"], written["baseline_bytes"]) == (7, None, 0)
    assert written["evidence"]["how"] == "measured"
    rows = (outputs / "watch.csv").read_text().splitlines()
    assert rows[0] == "seconds,used_bytes"
    assert [int(row.split(",")[1]) for row in rows[1:]] == [sample["used_bytes"] for sample in written["samples"]]
    assert (outputs / "watch.png").read_bytes().startswith(b"\x89PNG")
    assert "peak: " in done.stderr
    assert "exit code 7" in done.stderr
    assert "measured on cpu" in done.stderr
    assert "\x1b" not in done.stderr


@linux
def test_what_a_commands_children_hold_counts(fullbatch):
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDS!r}])"
    done = fullbatch("anatomy", "--watch", "--on", "cpu", "--every", "0.1", "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads((fullbatch.folder / "outputs" / "watch.json").read_text())["peak_bytes"] >= HELD


@linux
def test_the_kernels_count_finds_what_was_held_between_two_samples(fullbatch):
    done = fullbatch("anatomy", "--watch", "--on", "cpu", "--every", "60", "--", sys.executable, "-c", "b'x' * 1_000_000_000")
    assert done.returncode == 0, done.stderr
    written = json.loads((fullbatch.folder / "outputs" / "watch.json").read_text())
    assert written["peak_bytes"] < 100e6
    assert 1e9 <= written["largest_process_bytes"] < 1.1e9
    assert "largest process: " in done.stderr


@linux
def test_signals_are_passed_on_and_the_end_is_waited_for(tmp_path):
    command = [*WATCH, "--", sys.executable, "-c", SAYS_ITS_SIGNALS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes) as watching:
        assert watching.stdout.readline() == "ready\n"
        watching.send_signal(signal.SIGINT)
        assert watching.stdout.readline() == "told 2\n"
        watching.send_signal(signal.SIGTERM)
        stdout, stderr = watching.communicate(timeout=60)
    assert (watching.returncode, stdout) == (9, "told 15\n"), stderr
    assert "exit code 9" in stderr
    assert (tmp_path / "outputs" / "watch.json").exists()


@linux
def test_a_command_that_a_signal_ends_gives_the_shells_exit_code(fullbatch):
    done = fullbatch("anatomy", "--watch", "--on", "cpu", "--", "sh", "-c", "kill -KILL $$")
    assert done.returncode == 128 + 9, done.stderr
    assert "exit code 137: ended by SIGKILL, as the kernel does when the host's memory runs out" in done.stderr


@linux
def test_at_a_terminal_the_last_row_is_live_and_ctrl_c_reaches_the_command_once(tmp_path):
    import fcntl
    import pty
    import struct
    import termios

    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.environ |= {"TERM": "xterm-256color"}
        os.execv(WATCH[0], [*WATCH, "--", sys.executable, "-c", SAYS_ITS_SIGNALS])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    try:
        seen = read_until(terminal, "ready", "")
        seen = read_until(terminal, "peak", seen)
        os.write(terminal, b"\x03")
        seen = read_until(terminal, "told 2", seen)
        time.sleep(0.5)
        os.kill(pid, signal.SIGTERM)
        seen = read_until(terminal, "wrote outputs", seen)
    except BaseException:
        os.kill(pid, signal.SIGTERM)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 9, seen
    assert re.findall(r"told \d+", seen) == ["told 2", "told 15"]
    assert re.search(r"\x1b7\x1b\[\d+;1H\x1b\[2K\d+ s: .*peak .*\x1b8", seen)
    assert "\x1b[r" in seen.rpartition("told 15")[2]  # the terminal is whole again before the summary
    assert seen.count("peak: ") == 1


def read_until(terminal, text, seen):
    os.set_blocking(terminal, False)
    end = time.monotonic() + 60
    while text not in seen:
        assert time.monotonic() < end, seen
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 65536).decode()
    return seen


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--watch",), "--watch: needs a command to run"),
        (("--watch", "--"), "--watch: needs a command to run"),
        (("--", "python", "train.py"), "python: only --watch takes a command"),
        (("--every", "1"), "--every 1: only --watch takes it"),
        (("--watch", "--on", "cpu", "--", "pythonn", "train.py"), "--watch pythonn: not found"),
        (("--watch", "--on", "cpu", "--", "./mine.py"), "--watch ./mine.py: cannot be run: Permission denied"),
        (("--watch", "--task", "mlp", "--", "true"), "--task: --watch does not take it"),
        (("--watch", "--measure", "--", "true"), "--measure: --watch does not take it"),
        (("--watch", "--json", "-", "--", "true"), "--json -: stdout is the watched command's"),
        (("--watch", "--on", "mps", "--", "true"), "--on mps: its driver tells a process of its own memory only"),
        (("--watch", "--on", "abacus", "--", "true"), "abacus"),
    ],
)
def test_wrong_use_of_watch_exits_2_with_a_way_out_and_runs_nothing(fullbatch, arguments, told):
    done = fullbatch("anatomy", *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert told in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (fullbatch.folder / "outputs").exists()
