"""Stubs: imported, never called."""

import sys

import pytest

from slime_sglang.server.stubs import StubFinder


@pytest.fixture
def stubs(monkeypatch):
    finder = StubFinder(("no_such_kernels",))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    yield
    for name in [name for name in sys.modules if name.startswith("no_such_kernels")]:
        del sys.modules[name]


def test_missing_packages_can_be_imported(stubs):
    import no_such_kernels.deep.inside
    from no_such_kernels import mode
    from no_such_kernels.scalar_type import scalar_types

    assert no_such_kernels.__version__ == "0"
    assert mode.BICUBIC.value is not None
    assert issubclass(type(scalar_types.uint4), type)

    class Own(mode):
        pass


def test_a_call_raises_with_the_missing_name(stubs):
    from no_such_kernels import decode

    with pytest.raises(NotImplementedError, match=r"no_such_kernels\.decode"):
        decode(b"")


def test_installed_and_other_packages_are_not_replaced(stubs):
    with pytest.raises(ModuleNotFoundError):
        import no_such_other  # noqa: F401
