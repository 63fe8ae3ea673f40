tool mail_list '{}' >/dev/null
tool mail_get '{"id": "m-2"}' >/dev/null
tool mail_send '{"to": ["ruth@field.example"], "subject": "Re: My order", "body": "Your order A-1043 arrives on 2031-05-19.", "in_reply_to": "m-2"}' >/dev/null
echo 'I told the customer the day.'
