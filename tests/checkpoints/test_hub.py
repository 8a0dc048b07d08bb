"""Heads on the Hub: the real client against a small server on this machine."""

import re

import pytest
import yaml
from support.eagle import EAGLE_1, GOLDENS
from support.hub_client import HubClient, OfflineClient
from support.hub_server import OWNER, TOKEN, Repository, running_hub


SAFEAILAB, SPECULATORS = "safeailab_eagle3", "speculators_eagle3"
BIN, SAFE = "pytorch_model.bin", "model.safetensors"


@pytest.fixture(scope="module")
def hub():
    with running_hub() as server:
        yield server


@pytest.fixture(autouse=True)
def _clean(hub):
    hub.requests.clear()
    hub.cut_after.clear()


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    client = HubClient(tmp_path_factory.mktemp("home"), HF_ENDPOINT=hub.url)
    yield client
    client.close()


@pytest.fixture
def offline():
    return OfflineClient()


def files_of(golden):
    names = ("config.json", SAFE, BIN)
    return {name: (GOLDENS / golden / name).read_bytes() for name in names if (GOLDENS / golden / name).exists()}


def local(client, golden):
    return client.call("load", repo=str(GOLDENS / golden))["weights"]


def asked(hub, method="GET"):
    """The files that were asked for."""
    return [path.rsplit("/", 1)[-1] for verb, path, _ in hub.requests if verb == method and "/resolve/" in path]


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("golden", [SPECULATORS, SAFEAILAB, EAGLE_1])
def test_download(hub, client, golden, tmp_path):
    hub.publish(f"authors/{golden}", files_of(golden))
    found = client.call("load", repo=f"authors/{golden}", cache_dir=str(tmp_path))
    assert found["weights"] == local(client, golden)
    assert found["name"] == f"authors/{golden}"
    assert sorted(asked(hub)) == sorted(files_of(golden))
    assert all("Authorization" not in headers for _, _, headers in hub.requests)


def test_revision(hub, client, tmp_path):
    first = hub.publish("authors/two", files_of(SAFEAILAB))
    other = {"model.safetensors": (GOLDENS / SPECULATORS / SAFE).read_bytes()}
    hub.publish("authors/two", {"config.json": files_of(SPECULATORS)["config.json"]} | other)
    hub.repositories["authors/two"].branches["old"] = first

    def load(revision):
        return client.call("load", repo="authors/two", revision=revision, cache_dir=str(tmp_path))

    for revision, golden in ((None, SPECULATORS), ("main", SPECULATORS), ("old", SAFEAILAB), (first, SAFEAILAB)):
        assert load(revision)["weights"] == local(client, golden)
    missing = load("newer")
    assert "OSError" in missing["kinds"]
    assert "newer" in missing["message"]


def test_all_files_are_of_one_revision(hub, client, tmp_path):
    """A push between the download of the config and of the weights does not mix two heads."""
    first = hub.publish("authors/moving", files_of(SPECULATORS))
    client.call("load", repo="authors/moving", cache_dir=str(tmp_path))
    weights = [path for verb, path, _ in hub.requests if path.endswith(SAFE)]
    assert weights and all(f"/resolve/{first}/" in path for path in weights)


def test_second_time_nothing_is_downloaded(hub, client, tmp_path):
    hub.publish("authors/again", files_of(SAFEAILAB))
    for _ in range(2):
        hub.requests.clear()
        client.call("load", repo="authors/again", cache_dir=str(tmp_path))
    assert asked(hub) == []
    # Whether main has moved; transformers 5.17 also asks again for what the commit did not have.
    assert asked(hub, "HEAD")[0] == "config.json" and BIN not in asked(hub, "HEAD")
    client.call("load", repo="authors/again", cache_dir=str(tmp_path), force_download=True)
    assert sorted(asked(hub)) == sorted(["config.json", BIN])


def test_subfolder(hub, client, tmp_path):
    hub.publish("authors/many", {f"heads/a/{name}": data for name, data in files_of(SPECULATORS).items()})
    found = client.call("load", repo="authors/many", subfolder="heads/a", cache_dir=str(tmp_path))
    assert found["weights"] == local(client, SPECULATORS)


def test_private_repository(hub, client, tmp_path):
    hub.publish("someone/secret", files_of(SPECULATORS), private=True)
    load = {"repo": "someone/secret", "cache_dir": str(tmp_path)}
    for token in (None, False, "hf_of_nobody"):
        refused = client.call("load", **load, token=token)
        assert "OSError" in refused["kinds"], refused
        assert "private repository" in refused["message"]
    assert client.call("load", **load, token=TOKEN)["weights"] == local(client, SPECULATORS)


def test_no_such_repository(client, tmp_path):
    refused = client.call("load", repo="authors/nothing", cache_dir=str(tmp_path))
    assert "OSError" in refused["kinds"]
    assert "authors/nothing" in refused["message"]


@pytest.mark.parametrize(("missing", "message"), [("config.json", "config.json"), (SAFE, "there are no weights")])
def test_missing_file(hub, client, missing, message, tmp_path):
    files = {name: data for name, data in files_of(SPECULATORS).items() if name != missing}
    repo = f"authors/without-{missing.split('.')[0]}"
    hub.publish(repo, files)
    refused = client.call("load", repo=repo, cache_dir=str(tmp_path))
    assert "OSError" in refused["kinds"]
    assert message in refused["message"] and repo in refused["message"]


def test_interrupted_download_is_resumed(hub, client, tmp_path):
    hub.publish("authors/long", files_of(SPECULATORS))
    hub.cut_after[SAFE] = 100_000
    found = client.call("load", repo="authors/long", cache_dir=str(tmp_path))
    assert found["weights"] == local(client, SPECULATORS)
    ranges = [headers.get("Range") for verb, path, headers in hub.requests if verb == "GET" and path.endswith(SAFE)]
    assert len(ranges) == 2 and ranges[0] is None
    assert 50_000 < int(re.fullmatch(r"bytes=(\d+)-", ranges[1])[1]) <= 100_000


def test_offline_with_what_was_downloaded(hub, client, offline, tmp_path):
    """Also where the weights are a pickle: that there is no safetensors file is remembered."""
    for golden in (SPECULATORS, SAFEAILAB):
        load = {"repo": f"authors/{golden}", "cache_dir": str(tmp_path)}
        hub.publish(load["repo"], files_of(golden))
        client.call("load", **load)
        hub.requests.clear()
        assert client.call("load", **load, local_files_only=True)["weights"] == local(client, golden)
        assert offline.call("load", **load)["weights"] == local(client, golden)
        assert hub.requests == []


def test_unreachable_hub(hub, client, offline, tmp_path):
    load = {"repo": "authors/unreachable", "cache_dir": str(tmp_path)}
    hub.publish(load["repo"], files_of(SPECULATORS))
    for answer in (offline.call("load", **load), client.call("load", **load, local_files_only=True)):
        assert "OSError" in answer["kinds"], answer
        assert "couldn't connect" in answer["message"] or "cannot find" in answer["message"].lower()
    assert hub.requests == []


# ------------------------------------------------------------------------------------------------------------- writing


def card_of(files):
    _, metadata, text = files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(metadata), text


@pytest.mark.parametrize("golden", [EAGLE_1, SPECULATORS])
def test_upload_and_download(hub, client, golden, tmp_path):
    repo = f"{OWNER}/of-{golden}"
    answer = client.call("push", folder=str(GOLDENS / golden), repo=repo, token=TOKEN, target="owner/target")
    assert re.fullmatch(rf"{hub.url}/{repo}/commit/[0-9a-f]{{40}}", answer["url"]), answer
    files = hub.repositories[repo].commits[answer["url"].rsplit("/", 1)[-1]]
    assert files.keys() == {".gitattributes", "README.md", "config.json", SAFE}
    found = client.call("load", repo=repo, cache_dir=str(tmp_path))
    assert found["weights"] == local(client, golden)
    assert found["target"] == "owner/target"

    metadata, text = card_of(files)
    assert metadata["library_name"] == "hf_specdec"
    assert metadata["base_model"] == "owner/target"
    assert metadata["pipeline_tag"] == "text-generation"
    assert "speculative-decoding" in metadata["tags"]
    assert f'EagleHead.from_pretrained("{repo}")' in text
    assert len(hub.repositories[repo].commits) == 2  # the repository's own first commit, and one of ours


def test_own_name_alone_is_enough(hub, client):
    client.call("push", folder=str(GOLDENS / SPECULATORS), repo="short", token=TOKEN, private=True)
    assert hub.repositories[f"{OWNER}/short"].private
    assert f"{OWNER}/short" in card_of(hub.repositories[f"{OWNER}/short"].commits.popitem()[1])[1]


def test_shards(hub, client, tmp_path):
    repo = f"{OWNER}/shards"
    client.call("push", folder=str(GOLDENS / SPECULATORS), repo=repo, token=TOKEN, max_shard_size="100KB")
    files = hub.repositories[repo].commits[hub.repositories[repo].branches["main"]]
    assert sum(name.endswith(".safetensors") for name in files) > 1
    found = client.call("load", repo=repo, cache_dir=str(tmp_path))
    assert found["weights"] == local(client, SPECULATORS)


def test_a_card_that_is_there_is_kept(hub, client):
    repo = f"{OWNER}/with-card"
    hub.repositories[repo] = Repository()
    hub.publish(repo, {"README.md": b"---\nlicense: mit\n---\n\nWritten by hand.\n"})
    push = {"folder": str(GOLDENS / SPECULATORS), "repo": repo, "token": TOKEN}
    client.call("push", **push, tags=["mine"])
    metadata, text = card_of(hub.repositories[repo].commits[hub.repositories[repo].branches["main"]])
    assert metadata == {"license": "mit", "tags": ["mine"]}
    assert "Written by hand." in text

    client.call("push", **push, measured=3.5)
    metadata, text = card_of(hub.repositories[repo].commits[hub.repositories[repo].branches["main"]])
    assert metadata["model-index"][0]["results"][0]["metrics"][0]["value"] == 3.5
    assert "Written by hand." not in text


def test_branch_and_pull_request(hub, client, tmp_path):
    repo = f"{OWNER}/branches"
    push = {"folder": str(GOLDENS / SPECULATORS), "repo": repo, "token": TOKEN}
    client.call("push", **push, revision="trial")
    found = hub.repositories[repo]
    assert SAFE in found.commits[found.branches["trial"]]
    assert SAFE not in found.commits[found.branches["main"]]
    loaded = client.call("load", repo=repo, revision="trial", cache_dir=str(tmp_path))
    assert loaded["weights"] == local(client, SPECULATORS)
    assert client.call("push", **push, create_pr=True)["url"] == f"{hub.url}/{repo}/discussions/1"
    assert SAFE not in found.commits[found.branches["main"]]


def test_saving_may_push_too(hub, client, tmp_path):
    output = tmp_path / "saved-head"
    answer = client.call("save_and_push", folder=str(GOLDENS / SPECULATORS), output=str(output), token=TOKEN)
    assert answer == {}
    assert (output / SAFE).exists()
    found = hub.repositories[f"{OWNER}/saved-head"]
    assert SAFE in found.commits[found.branches["main"]]


@pytest.mark.parametrize("token", [None, "hf_of_nobody"])
def test_upload_without_leave(hub, client, token):
    repo = f"{OWNER}/forbidden"
    answer = client.call("push", folder=str(GOLDENS / SPECULATORS), repo=repo, token=token)
    assert "HfHubHTTPError" in answer["kinds"] or "LocalTokenNotFoundError" in answer["kinds"], answer
    assert repo not in hub.repositories
