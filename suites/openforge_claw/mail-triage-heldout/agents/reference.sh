tool mail_list '{}' >/dev/null
tool mail_move '{"id": "m-1", "folder": "invoices"}' >/dev/null
tool mail_move '{"id": "m-2", "folder": "newsletters"}' >/dev/null
tool mail_move '{"id": "m-4", "folder": "newsletters"}' >/dev/null
tool mail_move '{"id": "m-5", "folder": "invoices"}' >/dev/null
echo 'The inbox is sorted.'
