"""Building the C library: where the compiled file is kept, who may write there, and errors when it cannot be
built.
"""

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from meshwright.comm.shared_memory import compile_library
from meshwright.comm.shared_memory.compile_library import SharedMemoryUnavailable


def test_it_is_compiled_once_and_found_by_those_who_come_later(tmp_path: Path) -> None:
    with patch.object(compile_library, "_run", wraps=compile_library._run) as ran:
        first = compile_library._compile(tmp_path)
        again = compile_library._compile(tmp_path)
    assert first == again
    assert [call.args[1] for call in ran.call_args_list] == [compile_library.FLAGS[0]]
    assert {path.name for path in tmp_path.iterdir()} == {first.name, "compiling"}


def test_another_source_compiler_or_processor_is_another_file(tmp_path: Path) -> None:
    first = compile_library._compile(tmp_path)
    with patch.object(compile_library, "_cpu_features", return_value="flags: another"):
        assert compile_library._compile(tmp_path) != first
    with patch.object(compile_library, "FLAGS", (*compile_library.FLAGS, "-DANOTHER")):
        assert compile_library._compile(tmp_path) != first


def test_the_source_compiles_without_a_warning(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = Path(compile_library.__file__).parent / compile_library.SOURCE_FILES[0]
    subprocess.run(
        [compiler, *compile_library.FLAGS, "-Wall", "-Wextra", "-Werror", "-o", tmp_path / "x.so", source],
        check=True,
    )


def test_a_missing_compiler_is_reported_with_the_repair(tmp_path: Path) -> None:
    with (
        patch.object(compile_library.shutil, "which", return_value=None),
        pytest.raises(SharedMemoryUnavailable, match=r"no C compiler.*install one"),
    ):
        compile_library._compile(tmp_path)


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    with (
        patch.object(compile_library, "FLAGS", (*compile_library.FLAGS, "-include", "nowhere.h")),
        pytest.raises(SharedMemoryUnavailable, match=r"failed: .*nowhere\.h"),
    ):
        compile_library._compile(tmp_path)
    assert not list(tmp_path.glob("*.so"))


def with_home(path: Path) -> SimpleNamespace:
    return SimpleNamespace(pw_dir=str(path))


def test_the_folder_is_private_to_the_user(tmp_path: Path) -> None:
    with patch.object(compile_library.pwd, "getpwuid", return_value=with_home(tmp_path)):
        folder = compile_library._cache_folder()
    assert folder.is_relative_to(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    with (
        patch.object(compile_library.pwd, "getpwuid", return_value=with_home(tmp_path)),
        patch.object(compile_library.tempfile, "gettempdir", return_value=str(tmp_path / "temporary")),
    ):
        folder = compile_library._cache_folder()
        folder.chmod(0o770)
        second = compile_library._cache_folder()
        assert second.is_relative_to(tmp_path / "temporary")
        second.chmod(0o707)
        with pytest.raises(
            SharedMemoryUnavailable, match=r"no private folder at .* or .*; needed is one that only this user"
        ):
            compile_library._cache_folder()


def test_a_folder_behind_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / ".cache" / "meshwright").mkdir(parents=True)
    (tmp_path / ".cache" / "meshwright" / "native").symlink_to(tmp_path / "elsewhere")
    with (
        patch.object(compile_library.pwd, "getpwuid", return_value=with_home(tmp_path)),
        patch.object(compile_library.tempfile, "gettempdir", return_value=str(tmp_path)),
    ):
        assert compile_library._cache_folder() == tmp_path / f"meshwright-native-{os.getuid()}"


def test_a_user_without_a_name_keeps_it_with_temporary_files(tmp_path: Path) -> None:
    with (
        patch.object(compile_library.pwd, "getpwuid", side_effect=KeyError),
        patch.object(compile_library.tempfile, "gettempdir", return_value=str(tmp_path)),
    ):
        assert compile_library._cache_folder().parent == tmp_path


def test_other_systems_are_told_that_it_needs_linux() -> None:
    with (
        patch.object(compile_library.sys, "platform", "darwin"),
        pytest.raises(SharedMemoryUnavailable, match="needs Linux, and this is darwin"),
    ):
        compile_library.load_library.__wrapped__()
