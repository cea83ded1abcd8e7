"""Host headers of requests to a server without a key: another name may be a web page's, which resolves to this machine."""

import httpx
import pytest
from live_server import KEY, running

from penstock.errors import RangeError
from penstock.server.hosts import HOSTS, known_hosts

PATHS = ["/", "/v1/models", "/health", "/metrics", "/none"]
HERE = ["localhost", "127.0.0.1", "[::1]", "LOCALHOST", "localhost:8000", "127.0.0.1:1", "[::1]:8000"]
ELSEWHERE = ["example.org", "example.org:8000", "localhost.example.org", "127.0.0.1.example.org", "10.0.0.1", "", "[::1", "::1", "a" * 5000]


@pytest.fixture(scope="module")
def named(model):
    with running(model, hosts=["api.example.org"]) as live:
        yield live


def status(live, host, path="/v1/models"):
    answer = httpx.get(live.url + path, headers={"Host": host})
    if answer.status_code == 403:
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert answer.json()["error"]["message"].endswith("Serve with --allow-host, or with a key.")
        assert len(answer.content) < 1000
    return answer.status_code


@pytest.mark.parametrize("path", PATHS)
def test_other_hosts_are_refused_everywhere(named, path):
    assert status(named, "localhost", path) == status(named, "api.example.org", path) != 403
    assert status(named, "example.org", path) == 403


@pytest.mark.parametrize("host", HERE)
def test_names_of_this_machine_are_taken(live, host):
    assert status(live, host) == 200


@pytest.mark.parametrize("host", ELSEWHERE)
def test_other_names_are_refused(live, host):
    assert status(live, host) == 403


def test_a_request_without_a_host_is_of_no_browser(live):
    with live.connect() as connection:
        connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("given", [{"api_key": KEY}, {"hosts": ["*"]}], ids=["with a key", "all"])
def test_any_name_is_taken(model, given):
    with running(model, **given) as live:
        answer = httpx.get(f"{live.url}/v1/models", headers={"Host": "example.org", "Authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "LOCALHOST"])
def test_loopback_addresses_know_their_own_name(host):
    found = known_hosts(host, (), keyed=False)
    assert found is not None
    assert {"localhost", f"[{host}]" if ":" in host else host.lower()} <= found


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_others_can_reach_other_addresses_anyway(host):
    assert known_hosts(host, ["a"], keyed=False) is None


@pytest.mark.parametrize("host", ["https://example.org", "example.org:80", "Example.org", "", "a b", "::1"])
def test_what_is_no_host_is_refused(host):
    with pytest.raises(RangeError, match="serve: allow_host must be a name such as"):
        HOSTS.check("serve", ["*", "a-b.example.org", "[::1]", "10.0.0.1", host])
