"""Finished runs are kept, whatever ends a program; other files are not overwritten."""

import multiprocessing
import re
import signal
import subprocess

import pytest
from helpers.scripts import ROOT

from experiments.common import results
from experiments.common.rows import ROWS


def test_a_killed_process_keeps_what_is_finished(tmp_path):
    output = tmp_path / "runs.jsonl"
    results.append(output, {"config": "finished"})
    with pytest.raises(results.Stopped, match=f"killed.*: stopped; .* is kept in {output}"):
        results.complete(output, [(int(signal.SIGKILL),)], signal.raise_signal, workers=1)
    assert list(results.read(output)) == [results.key("finished")]


def test_after_an_error_no_further_run_begins(tmp_path):
    output = tmp_path / "runs.jsonl"
    jobs = [["false"], *(["sh", "-c", f"sleep 1; touch {tmp_path / str(n)}.ran"] for n in range(8))]
    others = set(multiprocessing.active_children())  # of other tests
    with pytest.raises(subprocess.CalledProcessError, match="'false'"):
        results.complete(output, [(job,) for job in jobs], subprocess.check_call, workers=1)
    for process in set(multiprocessing.active_children()) - others:
        process.join(60)
    assert len(list(tmp_path.glob("*.ran"))) < 4  # one and what the pool had handed out


@pytest.mark.parametrize(
    "text", ["no runs\n", "to do: all", '{"config": {}}\n[1, 2]\n', '{\n "machine": 1\n}', "\xff"]
)
def test_a_file_of_something_else_stays(tmp_path, text):
    output = tmp_path / "notes.txt"
    output.write_text(text, encoding="latin-1")
    before = output.read_bytes()
    with pytest.raises(ValueError, match=r"notes.txt, line \d, is not a run"):
        results.complete(output, [({"seed": 0},)], dict, workers=1)
    assert output.read_bytes() == before


def test_a_folder_is_no_file_of_runs(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path} is a folder: --output must be a file"):
        results.complete(tmp_path, [({"seed": 0},)], dict, workers=1)


def test_a_last_line_without_newline_is_kept(tmp_path):
    output = tmp_path / "runs.jsonl"
    results.append(output, {"config": "first"})
    output.write_text(output.read_text().rstrip())  # as some editors leave it
    results.append(output, {"config": "second"})
    assert list(results.read(output)) == ['"first"', '"second"']


def test_the_page_on_choosing_has_the_rows_of_the_ablation():
    page = (ROOT / "docs" / "choosing.md").read_text().partition("| loss | options |")[2]
    options = re.findall(r"^\| .* \| (?:`(.*)`|none: the defaults) \|$", page, flags=re.MULTILINE)
    assert [eval(f"dict({option})") for option in options] == list(ROWS.values())
