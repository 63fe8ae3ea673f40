tool mail_list '{}' >/dev/null
tool mail_get '{"id": "m-1"}' >/dev/null
tool mail_get '{"id": "m-2"}' >/dev/null
tool todo_list '{"owner": "Ana", "done": false}' >/dev/null
tool todo_update '{"id": "t-1", "owner": "Cy"}' >/dev/null
tool todo_update '{"id": "t-2", "owner": "Bo"}' >/dev/null
tool todo_update '{"id": "t-5", "owner": "Cy"}' >/dev/null
tool mail_send '{"to": ["bo@orchard.example"], "subject": "Ana'\''s tasks", "body": "Yours now: order jars"}' >/dev/null
tool mail_send '{"to": ["cy.rae@orchard.example"], "subject": "Ana'\''s tasks", "body": "Yours now: paint the gate, fix the scale"}' >/dev/null
echo 'Bo and Cy have the tasks and know it.'
