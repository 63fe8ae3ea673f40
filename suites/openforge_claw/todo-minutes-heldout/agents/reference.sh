cat minutes.md >/dev/null
tool todo_list '{}' >/dev/null
tool todo_create '{"title": "rent a truck", "owner": "Ana", "due": "2031-05-20", "priority": "normal"}' >/dev/null
tool todo_create '{"title": "test the press", "owner": "Bo", "due": "2031-05-12", "priority": "high"}' >/dev/null
echo 'Two actions were added.'
