"""Each planted bug is found by the check that it names, at the step that it names, and healthy runs have no alert."""

import json
from pathlib import Path

import pytest

from lib.log.alerts import FAULTS
from tests.common import ROOT
from tests.mutants.mutants import MUTANTS, Mutant
from tests.mutants.page import page
from tests.mutants.planting import finds, run, run_mutant
from tests.mutants.record import FILE


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name, tmp_path):
    outcome = run_mutant(MUTANTS[name], tmp_path)
    assert finds(MUTANTS[name], outcome), outcome.alerts
    assert outcome.step == MUTANTS[name].step <= 5


def setting(mutant: Mutant) -> tuple:
    """What the run is without the bug."""
    return mutant.script, mutant.healthy or mutant.prepare, *mutant.flags


@pytest.mark.parametrize("mutant", {setting(m): m for m in MUTANTS.values()}.values(), ids=lambda mutant: mutant.bug)
def test_the_same_run_without_the_bug_has_no_alert(mutant, tmp_path):
    prepare = mutant.healthy or mutant.prepare
    flags = [*mutant.flags, *(prepare(tmp_path) if prepare else []), "--total-steps", "2"]
    outcome = run(mutant.script, tmp_path, *flags)
    assert outcome.alerts == [] and len(outcome.rows) == 2


def test_where_a_planted_bug_is_the_source_has_the_text(tmp_path: Path):
    """A change that no longer fits its function would plant nothing."""
    with pytest.raises(AssertionError, match="0 times"):
        run_mutant(Mutant(" |  |  | 0", [("grpo:update", "no such text", "")]), tmp_path)


def test_each_fault_is_found_by_a_planted_bug_and_the_page_is_that_of_the_record():
    assert set(FAULTS) - {mutant.check for mutant in MUTANTS.values()} == {"positions"}  # which is not planted
    record = json.loads(FILE.read_text())
    assert [(row["mutant"], row["step"]) for row in record["mutants"]] == [(k, m.step) for k, m in MUTANTS.items()]
    assert [run for run in record["healthy"] if run["alerts"]] == []
    assert page(record) == (ROOT / "benchmarks/results/silent_bugs.md").read_text()
