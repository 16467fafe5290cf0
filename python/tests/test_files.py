"""Files that are written whole."""

import os
import threading

from hae.files import write_whole


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"page")
    reader.join()
    assert read == [b"page"]
    assert pipe.is_fifo()


def test_what_a_link_leads_to_is_replaced(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "link").symlink_to("there")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]
