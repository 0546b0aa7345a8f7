"""`reflogp token`: a token is printed with the lines of its settings, or these are added to a file."""

import hashlib
import tomllib


def test_a_token_without_a_settings_file_is_printed_with_its_lines(reflogp):
    code, out, _ = reflogp("token", "trainers", "--scope", "admin")
    secret, *lines = out.splitlines()
    [entry] = tomllib.loads("\n".join(lines))["tokens"]
    assert (code, entry["name"], entry["scopes"]) == (0, "trainers", ["admin"])
    assert entry["sha256"] == hashlib.sha256(secret.encode()).hexdigest()
    assert reflogp("token", "trainers", "--scope", "everything")[0] == 2


def test_a_settings_file_has_one_token_of_each_name(reflogp, tmp_path):
    file = tmp_path / "service.toml"
    file.write_text('store = "./logps"')
    for name in ("trainers", "notebooks"):
        assert reflogp("token", name, "--config", file)[0] == 0
    before = file.read_text()
    code, out, err = reflogp("token", "trainers", "--config", file)
    assert (code, out, file.read_text()) == (2, "", before)
    assert "already has a token with the name trainers: choose another name, or delete the lines" in err
    file.write_text("store = ./logps")
    assert "is not a TOML file" in reflogp("token", "trainers", "--config", file)[2]
    assert "cannot be written" in reflogp("token", "trainers", "--config", "/nowhere/service.toml")[2]
