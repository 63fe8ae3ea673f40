tool mail_get '{"id": "m-1"}' >/dev/null
tool mail_get '{"id": "m-2"}' >/dev/null
tool mail_get '{"id": "m-3"}' >/dev/null
tool mail_get '{"id": "m-4"}' >/dev/null
tool mail_get '{"id": "m-5"}' >/dev/null
tool mail_get '{"id": "m-6"}' >/dev/null
tool mail_get '{"id": "m-7"}' >/dev/null
tool mail_get '{"id": "m-8"}' >/dev/null
tool mail_get '{"id": "m-9"}' >/dev/null
tool mail_get '{"id": "m-10"}' >/dev/null
printf '%s\n' omar@mill.example ruth@field.example > waiting.txt
echo 'See waiting.txt.'
