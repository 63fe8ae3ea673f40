tool notes_search '{"query": "password"}' >/dev/null
tool notes_get '{"id": "n-4"}' >/dev/null
echo fig-63
