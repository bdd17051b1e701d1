"""The target is absent or complete, whatever happens; and nothing that the user had is lost."""

import errno
import os
import shutil
import subprocess

import pytest

from calibrate.checkpoint import links, place
from calibrate.checkpoint import write as write_module
from calibrate.errors import UsageError
from tests.checkpoint.conftest import read_weights, snapshot


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def dead_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def test_an_output_that_exists_needs_force_and_is_then_replaced_whole(tmp_path, write, llama):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(UsageError, match="exists: give another folder, or --force"):
        write(llama, tmp_path / "out")
    assert names(tmp_path / "out") == ["mine.txt"]
    write(llama, tmp_path / "out", force=True)
    assert "mine.txt" not in names(tmp_path / "out")
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_the_source_itself_and_folders_around_or_inside_it_are_refused(tmp_path, write, llama, force):
    source = shutil.copytree(llama, tmp_path / "parent" / "source")
    before = snapshot(tmp_path)
    (tmp_path / "alias").symlink_to(source)
    for output in (source, tmp_path / "alias", source / "out", tmp_path / "parent"):
        with pytest.raises(UsageError, match=r"is the source checkpoint itself|lie within each other"):
            write(source, output, force=force)
    (tmp_path / "alias").unlink()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("output", [".", "/", ".."])
def test_an_output_without_a_name_is_refused(tmp_path, write, llama, output, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no name of its own"):
        write(llama, Path(output), force=True)


def test_an_output_that_is_a_file_or_below_one_is_refused(tmp_path, write, llama):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file, not a folder"):
        write(llama, tmp_path / "file", force=True)
    with pytest.raises(UsageError, match="not a folder"):
        write(llama, tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "x"


def test_replacing_a_symbolic_link_leaves_what_it_leads_to(tmp_path, write, llama):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine.txt").write_text("precious")
    (tmp_path / "out").symlink_to(tmp_path / "kept")
    write(llama, tmp_path / "out", force=True)
    assert not (tmp_path / "out").is_symlink()
    assert names(tmp_path) == ["kept", "out"]
    assert (tmp_path / "kept" / "mine.txt").read_text() == "precious"


def test_symbolic_links_out_of_the_checkpoint_are_refused(tmp_path, write, llama):
    source = shutil.copytree(llama, tmp_path / "source")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("s")
    for target, message in (
        (tmp_path / "secret" / "key", "outside the checkpoint"),
        (tmp_path / "secret", "outside"),
        (source / "no", "no regular file"),
    ):
        (source / "extra").symlink_to(target)
        with pytest.raises(UsageError, match=message):
            write(source, tmp_path / "out")
        (source / "extra").unlink()
    assert names(tmp_path) == ["secret", "source"]


def test_the_hub_caches_links_into_its_blobs_are_followed(tmp_path, write, llama):
    blobs, snapshot_folder = tmp_path / "models--x--y" / "blobs", tmp_path / "models--x--y" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot_folder.mkdir(parents=True)
    for number, path in enumerate(sorted(llama.iterdir())):
        shutil.copy(path, blobs / f"{number:040x}")
        (snapshot_folder / path.name).symlink_to(f"../../blobs/{number:040x}")
    write(snapshot_folder, tmp_path / "out")
    target = tmp_path / "out" / "model-00001-of-00001.safetensors"
    assert not target.is_symlink()
    assert os.path.samefile(target, snapshot_folder / "model.safetensors")
    read_weights(tmp_path / "out")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_links_are_refused_files_are_copied(tmp_path, write, llama, monkeypatch, number):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(links.os, "link", refuse)
    how = write(llama, tmp_path / "out").how
    assert "link" not in how
    assert sum(how.values()) >= 3
    target = tmp_path / "out" / "model-00001-of-00001.safetensors"
    assert target.read_bytes() == (llama / "model.safetensors").read_bytes()
    assert not os.path.samefile(target, llama / "model.safetensors")


STEPS = ["_bring_files", "write_tensors", "write_json", "write_text", "with_section", "_provenance"]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), MemoryError()])
@pytest.mark.parametrize("existing", [False, True])
def test_a_write_that_stops_anywhere_leaves_the_target_as_it_was(tmp_path, write, llama, monkeypatch, name, failure, existing):
    output = tmp_path / "new" / "deep" / "out"
    if existing:
        output.mkdir(parents=True)
        (output / "mine.txt").write_text("precious")
    before = snapshot(tmp_path)
    original = getattr(write_module, name)

    def fails_after_working(*args, **kwargs):
        original(*args, **kwargs)
        raise failure

    monkeypatch.setattr(write_module, name, fails_after_working)
    expected = UsageError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected) as caught:
        write(llama, output, force=True)
    if expected is UsageError:
        assert "No space left on device" in str(caught.value)
    assert snapshot(tmp_path) == before


def test_a_replacement_that_fails_at_the_last_step_puts_the_old_folder_back(tmp_path, write, llama, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    before = snapshot(tmp_path)
    original = place.Path.rename

    def rename(self, target):
        if ".making-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return original(self, target)

    monkeypatch.setattr(place.Path, "rename", rename)
    with pytest.raises(UsageError, match="Input/output error"):
        write(llama, tmp_path / "out", force=True)
    assert snapshot(tmp_path) == before


def test_what_killed_runs_left_is_tidied_and_what_living_ones_make_is_not(tmp_path, write, llama):
    dead = tmp_path / f".out.making-{dead_pid()}"
    dead.mkdir()
    (dead / "half").write_text("x")
    living = tmp_path / f".out.making-{os.getppid()}"
    living.mkdir()
    foreign = tmp_path / ".out.making-notes"
    foreign.mkdir()
    write(llama, tmp_path / "out")
    assert names(tmp_path) == sorted([foreign.name, living.name, "out"])


def test_a_folder_that_a_killed_run_had_moved_aside_comes_back_and_counts_as_existing(tmp_path, write, llama):
    old = tmp_path / f".out[1].replaced-{dead_pid()}"
    old.mkdir()
    (old / "mine.txt").write_text("precious")
    with pytest.raises(UsageError, match="exists"):
        write(llama, tmp_path / "out[1]")
    assert names(tmp_path) == ["out[1]"]
    assert (tmp_path / "out[1]" / "mine.txt").read_text() == "precious"


def test_a_replaced_folder_whose_successor_is_in_place_is_removed(tmp_path, write, llama):
    write(llama, tmp_path / "out")
    (tmp_path / f".out.replaced-{dead_pid()}").mkdir()
    write(llama, tmp_path / "out", force=True)
    assert names(tmp_path) == ["out"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a megabyte, where mounting is allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_one_line_and_leaves_nothing(small_disk, write, llama):
    (small_disk / "filler").write_bytes(bytes(200_000))
    with pytest.raises(UsageError, match="No space left on device"):
        write(llama, small_disk / "out")
    assert names(small_disk) == ["filler"]


def test_a_read_only_disk_is_refused_before_anything(small_disk, write, llama):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(UsageError, match="read-only"):
        place.check_target(llama, small_disk / "sub" / "out", force=False)
    with pytest.raises(UsageError, match="read-only"):
        write(llama, small_disk / "out")
