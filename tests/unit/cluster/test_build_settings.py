"""What the image builds are told of this machine's way to package indexes."""

from __future__ import annotations

from pathlib import Path

from cluster.images.machine import CERTIFICATES, pip_config, pip_options


def test_the_environment_wins_over_files(tmp_path: Path) -> None:
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nindex-url = https://file.example/simple\ntrusted_host = file.example\nquiet = 1\n")
    options = pip_options({"PIP_INDEX_URL": "https://env.example/simple", "PIP_DEFAULT_TIMEOUT": "60"}, [file])
    assert options == {
        "index-url": "https://env.example/simple",
        "trusted-host": "file.example",
        "timeout": "60",
    }
    assert pip_options({"PIP_CONFIG_FILE": str(file)}, [])["index-url"] == "https://file.example/simple"


def test_only_places_that_hold_something_are_looked_into(tmp_path: Path) -> None:
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.mkdir()
    empty.mkdir()
    (full / "a.whl").touch()
    links = f"{empty} {full} https://links.example/ {tmp_path / 'none'}"
    assert pip_options({"PIP_FIND_LINKS": links}, [])["find-links"] == f"{full} https://links.example/"
    assert "find-links" not in pip_options({"PIP_FIND_LINKS": str(empty)}, [])


def test_certificates_lie_where_the_build_sees_them() -> None:
    written = pip_config({"cert": "/home/me/bundle.pem", "extra-index-url": "https://a.example\nhttps://b.example"})
    assert f"cert = {CERTIFICATES}\n" in written
    assert "extra-index-url = https://a.example\n  https://b.example\n" in written


def test_a_machine_without_settings_lends_none() -> None:
    assert pip_config(pip_options({}, [])) == "[global]\n"
