"""The fake says what the real library says, where that is installed; and it does not make things up."""

from __future__ import annotations

import pytest

from tests.support.prolog_epilog import fake_nvml
from tests.support.prolog_epilog.fake_nvml import FakeNvml, healthy_gpu


def test_names_and_numbers_are_those_of_the_real_library() -> None:
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed (pip install 'resilio_hpc[gpu]')")
    assert {name: getattr(real, name) for name in fake_nvml.CONSTANTS} == fake_nvml.CONSTANTS
    assert [error.__name__ for error in fake_nvml.ERRORS if not hasattr(real, error.__name__)] == []
    assert all(issubclass(getattr(real, error.__name__), real.NVMLError) for error in fake_nvml.ERRORS)
    questions = ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", *healthy_gpu(0)]
    assert [name for name in questions if not callable(getattr(real, name, None))] == []


def test_what_the_fake_does_not_know_it_refuses() -> None:
    with pytest.raises(AttributeError, match="nvmlDeviceGetFortune"):
        FakeNvml().nvmlDeviceGetFortune(0)
