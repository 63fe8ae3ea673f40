cat done.txt >/dev/null
tool todo_list '{}' >/dev/null
tool todo_update '{"id": "t-1", "done": true}' >/dev/null
tool todo_update '{"id": "t-5", "done": true}' >/dev/null
echo 'Both are done.'
