"""A server over this machine's sandboxes that speaks Orchard's REST protocol, with extensions (`wire`)."""
