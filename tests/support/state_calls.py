"""Calls of saved states over HTTP."""

import httpx

TEXT = "The sea was calm. " * 10


def ends(url, name):
    return f"{url}/v1/states/{name}"


def continued(client, state, prompt=" Then"):
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=20, seed=4, extra_body={"state": state})


def saves(live):
    """The name of a state that a server saved."""
    found = live.client.completions.create(model="tiny", prompt=TEXT, max_tokens=9, temperature=0, extra_body={"save_state": True})
    return found.choices[0].state


def listed(live):
    return [card["id"] for card in httpx.get(f"{live.url}/v1/states").json()["data"]]
