"""The NetworkPolicy that docs/connect-orchard.md asks for."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import yaml

DOCS = Path(__file__).parents[2] / "docs"


def test_it_allows_the_proxy_and_nothing_else() -> None:
    """Kubernetes' own field names (networking.k8s.io/v1), and the label that Orchard gives its pods."""
    policy = yaml.safe_load((DOCS / "orchard-networkpolicy.yaml").read_text())
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    assert policy["metadata"]["namespace"] == "sandbox-pods"
    spec = policy["spec"]
    assert spec["podSelector"] == {"matchLabels": {"app": "sandbox"}}
    assert spec["policyTypes"] == ["Egress"], "with Ingress the orchestrator could not reach the agent"
    (rule,) = spec["egress"]
    (peer,) = rule["to"]
    assert ipaddress.ip_network(peer["ipBlock"]["cidr"]).num_addresses == 1
    assert rule["ports"] == [{"protocol": "TCP", "port": 8443}]
