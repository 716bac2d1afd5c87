"""The update is compiled without trying each vector set, on x86 alone, unless the model is compiled too or the user has
decided otherwise. A model to be compiled where there is no compiler is told by a check, and refused by a start.
"""

import pytest
import torch
import torch._inductor.config as inductor

from megamix.cli.verbs import main
from megamix.train.compiler import load_compiler
from tests.builders import tiny_job


@pytest.mark.parametrize(
    ("capability", "compiles_model", "own", "want"),
    [
        ("AVX512", False, None, True),
        ("AVX2", False, None, True),
        ("AVX2", True, None, None),
        ("AVX2", False, False, False),
        ("DEFAULT", False, None, None),
        ("SVE256", False, None, None),
    ],
)
def test_vectors_are_tried_where_the_update_may_need_it(tmp_path, monkeypatch, capability, compiles_model, own, want):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    told = []
    monkeypatch.setattr("megamix.train.compiler.say_phase", told.append)
    with inductor.patch({"cpp.vec_isa_ok": own}):
        load_compiler(tiny_job(tmp_path, model={"compile": compiles_model}).model)
        assert inductor.cpp.vec_isa_ok is want
    assert told == ["loading torch's compiler, 1 of 2", "loading torch's compiler, 2 of 2"]


@pytest.mark.parametrize(("check", "status", "begin"), [(["--check"], 0, "note: "), ([], 2, "")])
def test_a_model_without_a_compiler_is_told_in_a_line(tmp_path, monkeypatch, data, capsys, check, status, begin):
    monkeypatch.setattr("megamix.cli.train.has_gpu", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / "job.toml").write_text(tiny_job(tmp_path, tokens=data, model={"compile": True}).text)
    assert main(["train", str(tmp_path / "job.toml"), *check]) == status
    said = "".join(capsys.readouterr())
    assert f"{begin}model.compile: is true, but there is no C++ compiler no-such-compiler; install it, " in said
    assert "Traceback" not in said
