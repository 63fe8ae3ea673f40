tool notes_list '{"tag": "supplies"}' >/dev/null
tool notes_get '{"id": "n-1"}' >/dev/null
tool notes_get '{"id": "n-3"}' >/dev/null
tool notes_get '{"id": "n-4"}' >/dev/null
tool notes_create '{"title": "Supplies", "body": "- cloths\n- nails\n- oil\n- soap\n- sugar\n- tea", "tags": ["supplies"]}' >/dev/null
tool notes_delete '{"id": "n-1"}' >/dev/null
tool notes_delete '{"id": "n-3"}' >/dev/null
tool notes_delete '{"id": "n-4"}' >/dev/null
echo 'One note has all supplies.'
